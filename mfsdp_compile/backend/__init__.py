"""The ``mfsdp`` backend of ``torch.compile``."""
