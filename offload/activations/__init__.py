"""Activations of a model: blocks that are computed again, the tiers in which their inputs wait, modules in tiles."""
