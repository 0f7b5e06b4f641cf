"""Numbers of each step: a meter that adds them up, and writers that they go to."""
