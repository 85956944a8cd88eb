"""Schedules as text, which passes write and the runtime reads."""
