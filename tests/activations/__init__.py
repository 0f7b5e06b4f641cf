"""Tests of inputs of blocks that are computed again, tiles of tokens, the loss in chunks."""
