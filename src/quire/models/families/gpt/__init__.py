"""The line of GPT-2: layer norms and plain MLPs."""
