"""Experts that a module stacks in parameters of one more dimension, each of which is a unit of its own."""
