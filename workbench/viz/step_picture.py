"""One panel of a step as a static picture: ``step.view("attention_mask")``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from html import escape
from pathlib import Path

from workbench.trace.records import StepRecord
from workbench.viz import svg
from workbench.viz.image import image, standalone
from workbench.viz.panel_names import panel_id
from workbench.viz.reprs import events_table, focus_of, fragment

DRAWN = ("packed_batch", "attention_mask", "block_tables", "events")
"""Panels that a step alone can draw."""


@dataclass(frozen=True)
class StepPicture:
    """A picture of a step.

    Attributes:
        title: Title of the picture.
        html: The picture as HTML.
        svg: The picture as SVG; "" for a table, and for a step without one.
    """

    title: str
    html: str
    svg: str = ""

    def __repr__(self) -> str:
        return f"StepPicture({self.title!r})"

    def _repr_html_(self) -> str:
        return fragment(f"<h5>{escape(self.title)}</h5>", self.html)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture as an SVG file.

        Raises:
            ValueError: It is a table, or the step has no such picture.
        """
        if not self.svg:
            what = "is a table" if self.title.startswith("Events") else "is empty"
            raise ValueError(f"{self.title} {what}: the pictures are {', '.join(DRAWN[:3])}")
        Path(path).write_text(self.svg, encoding="utf-8")


def view(record: StepRecord, name: str) -> StepPicture:
    """A panel of a step as a picture.

    Args:
        record: The step.
        name: "packed_batch", "attention_mask", "block_tables" or "events".

    Raises:
        ValueError: A step has no such picture.
    """
    shown, focus = panel_id(name), focus_of(chunk.request_id for chunk in record.chunks)
    drawn, html = "", ""
    if shown == "packed":
        title, drawn = "Packed batch", svg.packed_batch(record, focus)
    elif shown == "rectangle":
        title, drawn = "Attention mask", svg.mask(record, focus)
    elif shown == "tables":
        title, drawn = "Block tables", svg.block_tables(record, focus) if record.has_block_tables else ""
    elif shown == "events":
        title, html = "Events", events_table(record.events)
    else:
        raise ValueError(f"name is {name!r}: a step draws {', '.join(DRAWN)}; trace.view({name!r}) draws the others")
    html = image(drawn) if drawn else html or "<p>Nothing was scheduled in this step.</p>"
    return StepPicture(f"{title} of step {record.step}", html, standalone(drawn) if drawn else "")
