"""Ollama's API: chat, generate, and its list of models."""
