"""The methods of the engine, by what they are for; `engine.py` adds those of a training loop."""
