"""Other people's training loops over sharded models: Hugging Face's ``Trainer``, accelerate, and torchtitan.

Each module needs the library of its name, and nothing else in the package imports it.
"""
