"""Example programs: a plain training loop, Hugging Face's Trainer, and a job configured as torchtitan's jobs are."""
