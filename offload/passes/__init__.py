"""The order in which the micro-batches of a step pass through the blocks, and their random generators."""
