"""Figures that others published: GPUs with their sources, and the mark that each rate of a plan carries."""
