"""The names of panels: one for each, that of its title on the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

from workbench.base.field_checks import suggestion

PanelName = Literal[
    "step_timeline",
    "chunks",
    "compare",
    "packed_batch",
    "attention_mask",
    "attention_weights",
    "attention_work_list",
    "texts",
    "kv_pool",
    "block_tables",
    "events",
    "metrics",
    "what_happened",
]

PANELS: dict[PanelName, str] = {
    "step_timeline": "timeline",
    "chunks": "gantt",
    "compare": "compare",
    "packed_batch": "packed",
    "attention_mask": "rectangle",
    "attention_weights": "weights",
    "attention_work_list": "kernel",
    "texts": "texts",
    "kv_pool": "pool",
    "block_tables": "tables",
    "events": "events",
    "metrics": "metrics",
    "what_happened": "incident",
}
"""By the name of a panel, its title in lower case with underscores, the shorter word of the browser's code."""


def panel_id(name: str) -> str:
    """The browser's word for a panel, by its name, its title or that word itself.

    Raises:
        ValueError: There is no such panel.

    >>> panel_id("kv_pool"), panel_id("KV pool"), panel_id("pool")
    ('pool', 'pool', 'pool')
    """
    if name in PANELS.values():
        return name
    try:
        return PANELS[cast("PanelName", name.lower().replace(" ", "_"))]
    except (KeyError, AttributeError):
        raise ValueError(f"panels: unknown {name!r}; known are {', '.join(PANELS)}{suggestion(name, PANELS)}") from None


def panel_ids(panels: Sequence[str] | str) -> list[str]:
    """The browser's words for several panels: a sequence of names, or a text with one name or several with commas.

    Raises:
        ValueError: There is no such panel.

    >>> panel_ids("chunks, KV pool"), panel_ids(("chunks",)), panel_ids(())
    (['gantt', 'pool'], ['gantt'], [])
    """
    names = [name.strip() for name in panels.split(",")] if isinstance(panels, str) else panels
    return [panel_id(name) for name in names]
