"""Trainers of other libraries on an engine, a module for each: `offload.integrations.lightning`."""
