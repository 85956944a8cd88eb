"""Small language models, text and a training loop for ``mfsdp demo``, and examples of trainers."""
