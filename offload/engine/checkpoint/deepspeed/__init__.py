"""DeepSpeed's checkpoints as checkpoints that an engine loads: ZeRO stages 1 to 3, and universal ones."""
