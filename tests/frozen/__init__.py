"""Tests of frozen, quantized and 4-bit weights, and the adapters beside them."""
