"""The blocks of a config, as pydantic models."""
