"""Runs that are stored on disk: inspection, verification, export."""
