"""Tests of `offload plan`, `offload probe`, and the simulation."""
