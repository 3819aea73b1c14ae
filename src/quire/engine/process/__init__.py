"""The engine in a process of its own, and the messages it exchanges with the API process."""
