"""A run in swap files goes on with another number of ranks: its states are divided anew at the start."""
