"""Where engines run, and the connections to them: processes of this machine, or actors of a Ray cluster."""
