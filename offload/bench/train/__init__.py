"""A benchmark of training: the same model by plain PyTorch, by the placements of this package, and by its peers.

`plan` contains the settings and the contenders. `loops` runs them in turns, each turn in a process of its own, whose
code is `__main__`, builds the contenders there, and times their steps. `figures` draws the conclusions, and shows them
as tables and as a chart.
"""
