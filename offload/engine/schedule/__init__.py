"""The order in which the micro-batches of a step pass through the units of a model."""
