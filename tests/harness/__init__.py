"""Tests of the tests' own tools: samples, workers, mutants, storms, the late device."""
