"""Frozen parameters that another library has quantized: their bytes are paged, and their own code computes with them."""
