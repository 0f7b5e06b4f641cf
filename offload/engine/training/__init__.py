"""Components, settings and state of training."""
