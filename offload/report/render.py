"""The page's HTML, CSS and script as Jinja2 templates, which escape all values."""

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
    """Returns the template `name` filled with `values`. Text is escaped; `Markup` is inserted unchanged."""
    return Markup(_environment().get_template(name).render(**values))
