"""The parts of a model that a grid of processes has, as the weights of a whole one: stages in a row, shards joined."""
