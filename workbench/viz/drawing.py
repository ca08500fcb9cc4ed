"""SVG files: their common frame, text and colours, which turn dark with the page that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from workbench.viz.palette import DARK

INK, GRID, NEUTRAL = "#1f2328", "#d0d7de", "#555555"
"""Colours of text, of the lines of a grid, and of marks without a hue; a dark page turns them over."""

_TURNED = {INK: DARK.text, GRID: DARK.hairline, NEUTRAL: DARK.muted}
_RULES = "".join(
    f'.wb-drawing [{name}="{light}"]{{{name}:{dark}}}' for light, dark in _TURNED.items() for name in ("fill", "stroke")
)
_STYLE = f"@media (prefers-color-scheme:dark){{.wb-drawing>.paper{{fill:{DARK.background}}}{_RULES}}}"


def svg_file(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    """An SVG of these parts, which draws itself dark where the element around it is dark.

    Programs that know no media queries draw it on white.

    Args:
        width: In units of the drawing, as is the height.
        height: See ``width``.
        label: The words for those who do not see it.
        parts: SVG elements; `INK`, `GRID` and `NEUTRAL` among their colours are turned over.
    """
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="wb-drawing" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(label, quote=True)}" font-family="system-ui, sans-serif" font-size="12">'
        f"<style>{_STYLE}</style>"
        f'<rect class="paper" width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>'
    )


def text(x: float, y: float, content: str, anchor: str = "start") -> str:
    """A text of an SVG; ``anchor`` says which part of it is at the place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}">{escape(content)}</text>'
