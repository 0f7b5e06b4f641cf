"""Activations of a step: their bytes in every tier, and where the inputs of repeated blocks wait."""
