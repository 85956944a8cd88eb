"""What ``mfsdp demo`` runs (small language models, text that every machine has, a training loop), and examples of trainers."""
