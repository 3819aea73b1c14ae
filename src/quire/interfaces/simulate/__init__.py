"""The simulator: the real scheduler and block manager with a fake model and a virtual clock; runs are repeatable."""
