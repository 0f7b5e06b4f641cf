"""Folders to resume from: saved and loaded on any number of ranks, and read in the formats of other libraries."""
