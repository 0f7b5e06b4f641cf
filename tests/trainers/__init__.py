"""Tests of Trainer, Accelerate, Lightning, LLaMA-Factory, axolotl."""
