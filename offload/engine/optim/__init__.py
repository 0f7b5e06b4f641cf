"""The optimizer, its algorithms, and the worker that updates states tile by tile."""
