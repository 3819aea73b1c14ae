"""Reading, packing, quantizing and saving checkpoints."""
