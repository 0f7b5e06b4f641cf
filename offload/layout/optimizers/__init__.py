"""Optimizers whose states differ from parameter to parameter: which states each parameter has."""
