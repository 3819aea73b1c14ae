"""The real scheduler and block manager under a fake model and a virtual clock: one seed is one replayable run."""
