"""An engine whose layers are divided among stages, in processes of this machine or of several, that pass states on."""
