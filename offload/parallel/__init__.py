"""Models and sequences divided among processes: tensors, stages of a pipeline, parts of a sequence."""
