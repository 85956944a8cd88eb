"""Third-party training loops over sharded models: Hugging Face's ``Trainer``, accelerate, and torchtitan.

Each module needs the library of its name. Nothing else in the package imports these modules.
"""
