"""Tests of the tests' own oracles: rounding bounds, mutants."""
