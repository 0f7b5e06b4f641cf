"""Tests of the I/O engine and DeepNVMe's names for it."""
