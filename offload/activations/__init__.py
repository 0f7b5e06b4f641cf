"""activations."""
