"""Tests of a device with memory and streams of its own: CUDA and others, and the test device in their place."""
