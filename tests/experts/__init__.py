"""Tests of mixtures of experts, stacked or not."""
