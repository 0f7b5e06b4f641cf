"""Tests of the JSON: its keys, errors, notices and derived values."""
