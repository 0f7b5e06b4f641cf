"""The page's HTML, CSS and script as Jinja2 templates; values are escaped wherever they are put into one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=jinja2.select_autoescape(("html",)),
        undefined=jinja2.StrictUndefined,
    )


def render(name: str, **values: Any) -> Markup:
    """Returns the template `name` with `values` in it. Text is escaped; `Markup` is put in as it is."""
    return Markup(_environment().get_template(name).render(**values))
