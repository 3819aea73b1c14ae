"""Arguments by name: vLLM's, and the options of a command line."""
