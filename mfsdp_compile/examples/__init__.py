"""What ``mfsdp demo`` runs: a small language model, text that every machine has, and a training loop."""
