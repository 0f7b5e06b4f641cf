"""Tests of steps of several micro-batches, in either order."""
