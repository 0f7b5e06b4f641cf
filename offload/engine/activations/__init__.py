"""Activations: units that are computed again in backward, and the tiers in which their inputs wait until then."""
