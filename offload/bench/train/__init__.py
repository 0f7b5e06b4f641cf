"""A benchmark of training: the same model by plain PyTorch, by the placements of this package, and by its peers.

`plan` contains the settings and the contenders, `rounds` runs them in turns, each turn in a process of its own, whose
code is `__main__`. There `loops` and `peers` build the contenders, and `trainer` times their steps. `figures` draws the
conclusions, and `output` shows them as tables and as a chart.
"""
