"""Analysis of a run: the time of a step by phase, and `offload report`, a page made from a log and a timeline.

| file | content |
|---|---|
| `phases.py` | phases of a step, and the phase that limits the step |
| `log.py` | steps of a log, after kills and resumes too |
| `figures.py` | numbers of a run, beside the predicted ones and the drives' rated life |
| `links.py` | spans of a timeline, and the links of the machine that they keep busy |
| `timeline_view.py` | one step of a timeline |
| `charts.py`, `templates/` | lines and stacks as SVG; HTML, CSS and script of the page |
| `page.py` | content of the page: tiles, sections, tables |

The package needs neither torch nor a network, so a log can be examined on any machine.
"""
