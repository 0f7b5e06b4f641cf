"""Engines that run a model and do not train it: weights are read from the model's own files, where they lie."""
