"""One module per engine, run by that engine's own interpreter: loads a model once, then does what it is asked."""
