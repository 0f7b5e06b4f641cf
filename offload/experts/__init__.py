"""Experts that are units of their own: rows of stacked parameters, and adapters of peft that target such parameters."""
