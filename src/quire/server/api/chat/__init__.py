"""Chat completions: prompt, run, events, answer."""
