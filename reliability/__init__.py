"""Programs that try to break the server, count the outcomes, and write the last full result to docs/reliability.md."""
