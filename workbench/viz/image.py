"""Static pictures as images: a notebook that JupyterLab does not trust keeps ``<img>`` and drops ``<svg>``."""

from __future__ import annotations

import re
from base64 import b64encode

from workbench.viz.style import STYLE

_SIZE = re.compile(r'viewBox="0 0 (\d+) (\d+)"')
_LABEL = re.compile(r'aria-label="([^"]*)"')
_LIGHT = re.sub(r"@media \(prefers-color-scheme:dark\)\{.*?\}\}", "", STYLE)


def standalone(drawing: str) -> str:
    """An SVG file of a drawing: the views' styles in the light theme, on white. A file stays as it is."""
    if drawing.startswith("<svg xmlns"):
        return drawing
    width, height = _found(_SIZE, drawing).groups()
    inner = drawing.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="wb-repr" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><style>{_LIGHT}</style><rect width="100%" height="100%" fill="#fff"/>{inner}</svg>\n'
    )


def image(drawing: str) -> str:
    """An ``<img>`` of a drawing, with its label as the alternative text; "" for an empty drawing.

    It is black on white in every theme, because a picture in a data URI does not see the page's colours.
    """
    if not drawing:
        return ""
    width, height = _found(_SIZE, drawing).groups()
    data = b64encode(standalone(drawing).encode()).decode()
    return (
        f'<img alt="{_found(_LABEL, drawing)[1]}" width="{width}" height="{height}" '
        f'style="max-width:100%;height:auto;border-radius:4px" src="data:image/svg+xml;base64,{data}">'
    )


def _found(pattern: re.Pattern[str], drawing: str) -> re.Match[str]:
    match = pattern.search(drawing)
    assert match is not None, f"not a drawing of this package: {drawing[:80]}"
    return match
