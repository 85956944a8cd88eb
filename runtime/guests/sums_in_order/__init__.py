"""Gradients that ranks exchange in slices and add in float32, in the order of ranks; in 16, 8 or 4 bits on the wire."""
