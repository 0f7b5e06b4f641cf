"""Frozen parameters that another library has quantized: their bytes are paged, and its code computes with them."""
