"""Weights that are read from a model's own safetensors files: nothing is copied, and nothing is written."""
