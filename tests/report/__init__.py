"""Tests of logs, metrics, timelines and `offload report`."""
