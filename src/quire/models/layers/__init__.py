"""What models are made of. Layers take their inputs as arguments and keep only weights."""
