"""The GPU in one command: `offload bench gpu`, or `python -m bench.gpu` in a checkout.

`__main__` is the command. `parts` gives each part its share of the minutes, in a process of its own; `correctness`,
`gpu_tests`, `copies`, `rates`, `training` and `deepspeed` are the parts' work, `work` and `planned` their sizes and
placements, `exposure` divides a step's time, and `report` says it all in words.
"""
