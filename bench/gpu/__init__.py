"""`python -m bench.gpu`: another name of `offload bench gpu`, for a checkout."""
