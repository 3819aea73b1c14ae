"""Requests inside the engine, from prompt and parameters to outputs."""
