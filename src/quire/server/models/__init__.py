"""The models of a server: what is served, which of them are loaded, and which a request uses."""
