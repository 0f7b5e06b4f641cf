"""Tests of checkpoints and resumes: what continues, and with how many ranks."""
