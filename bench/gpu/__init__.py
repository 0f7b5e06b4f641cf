"""What a GPU gives, in one command: `python -m bench.gpu`.

`__main__` is the command. `parts` gives each part its share of the minutes, in a process of its own; `correctness`,
`copies` and `training` are what the parts do, `work` what they do it with, and `report` says it all in words.
"""
