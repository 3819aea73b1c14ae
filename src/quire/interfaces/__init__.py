"""What a caller holds: LLM, AsyncLLM, and the simulator. Each is a thin layer over one engine."""
