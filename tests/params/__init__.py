"""Tests of parameters between steps: reads, edits, `requires_grad`."""
