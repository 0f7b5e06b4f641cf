"""Folders to resume from, on any number of ranks."""
