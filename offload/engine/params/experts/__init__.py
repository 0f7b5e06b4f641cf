"""Stacked parameters whose rows, one for each expert, are in units of their own."""
