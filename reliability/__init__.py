"""What tries to break the server, counts what it saw, and writes its last full result into docs/reliability.md."""
