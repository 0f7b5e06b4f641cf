"""What a GPU gives, in one command: `python -m bench.gpu`.

`__main__` is the command. `parts` gives each part its share of the minutes, in a process of its own; `correctness`,
`gpu_tests`, `copies`, `rates`, `training` and `deepspeed` are what the parts do, `work` and `planned` what they do it
with, `exposure` finds where a step's time goes, and `report` says it all in words.
"""
