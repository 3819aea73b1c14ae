"""AsyncLLM: the interface for servers, which streams outputs from an engine that runs in a process of its own."""
