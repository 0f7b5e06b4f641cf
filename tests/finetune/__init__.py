"""Tests of the texts of `offload train`, and their rows of tokens."""
