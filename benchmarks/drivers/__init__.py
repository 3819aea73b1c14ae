"""One module per engine, run by that engine's own interpreter: it loads a model once and then answers requests."""
