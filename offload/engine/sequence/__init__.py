"""Sequence parallelism: each rank computes a part of every sequence, and a part of the heads in attention."""
