"""Ranks of a test, and what they train together."""
