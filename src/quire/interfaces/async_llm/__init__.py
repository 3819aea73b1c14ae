"""AsyncLLM: the serving front door. Requests in, outputs as they come, from an engine in a process of its own."""
