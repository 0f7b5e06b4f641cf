"""From a model and a config to an engine: decisions first, then components."""
