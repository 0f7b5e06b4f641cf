"""Checkpoints of other programs as checkpoints that an engine loads: DeepSpeed's, and torch's distributed ones."""
