"""Static pictures as images: a notebook that JupyterLab does not trust keeps ``<img>`` and drops ``<svg>``."""

from __future__ import annotations

import re
from base64 import b64encode

from workbench.viz.style import STYLE

_SIZE = re.compile(r'viewBox="0 0 (\d+) (\d+)"')
_LABEL = re.compile(r'aria-label="([^"]*)"')
_LIGHT = re.sub(r"@media \(prefers-color-scheme:dark\)\{.*?\}\}", "", STYLE)
_BOTH = f"{STYLE}.wb-repr{{color:var(--wb-text)}}.wb-repr>rect{{fill:var(--wb-background)}}"


def standalone(drawing: str, themed: bool = False) -> str:
    """An SVG file of a drawing with the views' styles. A file stays as it is.

    Args:
        drawing: An SVG that ``svg.drawing`` or ``drawing.svg_file`` has made.
        themed: Whether it turns dark with the element around it; otherwise it is drawn on white.
    """
    if drawing.startswith("<svg xmlns"):
        return drawing
    width, height = _found(_SIZE, drawing).groups()
    inner = drawing.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    style = _BOTH if themed else _LIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="wb-repr" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><style>{style}</style><rect width="100%" height="100%" fill="#fff"/>{inner}</svg>\n'
    )


def image(drawing: str) -> str:
    """An ``<img>`` of a drawing, with its label as the alternative text; "" for an empty drawing.

    A picture in a data URI does not see the page's colours, only whether the element around it is light or dark.
    """
    if not drawing:
        return ""
    width, height = _found(_SIZE, drawing).groups()
    data = b64encode(standalone(drawing, themed=True).encode()).decode()
    return (
        f'<img alt="{_found(_LABEL, drawing)[1]}" width="{width}" height="{height}" '
        f'style="max-width:100%;height:auto;border-radius:4px" src="data:image/svg+xml;base64,{data}">'
    )


def _found(pattern: re.Pattern[str], drawing: str) -> re.Match[str]:
    match = pattern.search(drawing)
    assert match is not None, f"not a drawing of this package: {drawing[:80]}"
    return match
