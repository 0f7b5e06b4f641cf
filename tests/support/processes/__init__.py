"""Processes of a test: warm ones, commands, limits of their memory and calls."""
