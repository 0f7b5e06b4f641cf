"""model_io."""
