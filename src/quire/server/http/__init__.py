"""HTTP: protocol, bodies, errors, event streams, authentication, the table of endpoints."""
