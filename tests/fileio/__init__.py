"""Tests of files beside the store: atomic writes, locks, safetensors, `torch.save`."""
