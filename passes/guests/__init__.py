"""Guests: passes that the core does not name, and the solver. Options of the backend ask for them."""
