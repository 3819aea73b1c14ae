"""Chat templates of checkpoints, rendered in a sandbox with a budget."""
