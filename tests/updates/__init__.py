"""Tests of updates: their tiles, and those made under the backward."""
