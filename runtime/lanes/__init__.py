"""Lanes: how a bucket travels, as lists of stages. See docs/write_a_stage.md."""
