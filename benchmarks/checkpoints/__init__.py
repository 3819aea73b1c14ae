"""Checkpoints with random weights, in the shapes that are measured; the measurements do not depend on the weights."""
