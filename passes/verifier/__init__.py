"""Checks every graph against the rules that keep gradients right."""
