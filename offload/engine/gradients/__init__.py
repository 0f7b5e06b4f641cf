"""Gradients from autograd to the memory where updates read them."""
