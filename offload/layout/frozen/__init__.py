"""Frozen weights that are stored as blocks of codes: which they are, and where their values go on the device."""
