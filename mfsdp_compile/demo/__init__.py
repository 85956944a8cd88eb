"""``mfsdp demo``: train a small transformer on real text, then report memory, collectives and loss."""
