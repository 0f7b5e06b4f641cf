"""Tests of from autograd to the update: hooks, sums, spills."""
