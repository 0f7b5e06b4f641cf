"""Numbers of each step, the writers that receive them, and spans of computation."""
