"""What a run has shown: where a step's time goes, and `offload report`, a page made of a log and a time line.

| file | what it is |
|---|---|
| `phases.py` | the parts of a step, and which of them it is bound by |
| `log.py` | the steps of a log, whatever a kill or a resume has made of the file |
| `predicted.py` | what a plan has foreseen |
| `figures.py` | the numbers of a whole run |
| `spans.py` | one step of a time line |
| `charts.py` | lines, stacks and rows as SVG |
| `page.py` | what the page shows: tiles, sections, tables |
| `render.py`, `templates/` | its HTML, CSS and script |

Needs neither torch nor a network: a log can be looked at on any machine.
"""
