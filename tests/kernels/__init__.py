"""Tests of arithmetic: each kernel is its formula, on every processor."""
