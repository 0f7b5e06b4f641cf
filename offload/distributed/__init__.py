"""What the ranks of a run share: groups, the order of collectives, gathers, reductions, another number of ranks."""
