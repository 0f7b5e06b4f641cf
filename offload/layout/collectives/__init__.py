"""Sizes of what ranks send each other, and of the device memory that it passes through."""
