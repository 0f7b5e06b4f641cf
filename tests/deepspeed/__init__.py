"""Tests of DeepSpeed's API, scripts, schedules and checkpoints."""
