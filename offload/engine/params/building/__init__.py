"""What code does to parameters without values while a model is built."""
