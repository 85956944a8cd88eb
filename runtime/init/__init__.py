"""Initial values of parameters that were made on the meta device."""
