"""Guests: ways to travel that the core does not name. Each is a folder that changes lanes."""
