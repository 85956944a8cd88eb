"""Commands and functions that explain what happens, or what went wrong."""
