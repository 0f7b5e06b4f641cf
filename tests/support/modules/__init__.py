"""Modules of all kinds, and the losses of them."""
