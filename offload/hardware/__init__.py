"""This machine: description, and a probe of its rates."""
