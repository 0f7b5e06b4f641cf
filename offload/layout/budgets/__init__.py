"""Bytes of host and device memory that a run takes: what its parts need, and how a budget is divided among them."""
