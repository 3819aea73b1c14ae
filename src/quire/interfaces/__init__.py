"""The interfaces of the engine: LLM (offline), AsyncLLM (serving) and the simulator, each a thin layer over it."""
