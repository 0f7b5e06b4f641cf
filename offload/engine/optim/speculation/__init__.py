"""Updates under the backward: made before the step is decided, then confirmed by it, or made again."""
