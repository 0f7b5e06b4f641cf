"""Tests of `offload.inference`, `offload score` and `offload generate`."""
