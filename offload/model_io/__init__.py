"""A model's files: loaded into units, and written from units, under the names that the model's class saves."""
