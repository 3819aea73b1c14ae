"""What a checkpoint folder holds: which tensors, where, and their bytes. No torch."""
