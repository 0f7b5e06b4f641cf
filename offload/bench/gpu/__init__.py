"""A benchmark of a GPU in parts: `offload bench gpu`, or `python -m bench.gpu` in a checkout.

`__main__` is the command. `parts` runs each part in a process of its own, within the budget of minutes, and contains
the short ones. `training` measures steps, and divides their time. `report` formats the results.
"""
