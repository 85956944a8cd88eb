"""Small language models: for the demo, for plans and for tests."""
