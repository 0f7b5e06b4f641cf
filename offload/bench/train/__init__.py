"""A benchmark of training: the same model by plain PyTorch, by the placements of this package, and by its peers.

`plan` contains the settings and the contenders. `loops` runs the contenders in turns, each turn in a new process. In
that process `loops` builds the contender and times its steps. `figures` draws conclusions, and shows them as tables
and as a chart.
"""
