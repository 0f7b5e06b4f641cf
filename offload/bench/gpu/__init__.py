"""A benchmark of a GPU in parts: `offload bench gpu`.

`__main__` runs each part in a process of its own, and is that process. `parts` has the short parts, and their order
within the budget of minutes. `training` measures steps, and divides their time. `report` formats the results.
"""
