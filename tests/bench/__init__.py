"""Tests of `offload bench` and the programs in `bench/`."""
