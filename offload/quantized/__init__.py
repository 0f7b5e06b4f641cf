"""Frozen weights that another library has quantized: the bytes of its tensors, paged for good."""
