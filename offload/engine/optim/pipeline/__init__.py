"""Tiles of updates: their memory, and their way from reads through the kernel to writes."""
