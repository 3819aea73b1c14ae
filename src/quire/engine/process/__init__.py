"""The engine in a process of its own, and the messages that it exchanges with the API process."""
