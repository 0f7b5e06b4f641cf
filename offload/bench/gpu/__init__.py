"""A benchmark of a GPU in parts: `offload bench gpu`, or `python -m bench.gpu` in a checkout.

`__main__` is the command. `parts` runs each part in a process of its own, within the budget of minutes. `correctness`,
`gpu_tests`, `copies`, `rates`, `training` and `deepspeed` contain the work of the parts, `work` and `planned` their
sizes and placements. `exposure` divides a step's time, and `report` formats the results.
"""
