"""Draws and log-probabilities, and their inputs."""
