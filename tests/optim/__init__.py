"""Tests of optimizers, their states and the forms of these."""
