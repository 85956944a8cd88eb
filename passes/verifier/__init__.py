"""Check every graph against the rules that keep gradients correct."""
