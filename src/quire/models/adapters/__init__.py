"""LoRA adapters: read from PEFT folders, and kept in slots of a model's projections."""
