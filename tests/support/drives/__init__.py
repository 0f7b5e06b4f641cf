"""Drives that fail, are cut off or full, and file systems of a test."""
