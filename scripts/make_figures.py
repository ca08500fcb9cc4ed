"""Draw the figures of the documentation with the project's own views: ``python scripts/make_figures.py``.

Each is a simulated run, so a machine without the model draws the same bytes. ``--check`` draws them and compares.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from workbench import simulate
from workbench.viz import reprs, svg

FOLDER = Path(__file__).parent.parent / "docs" / "images"


def figures() -> Iterator[tuple[str, str]]:
    """Name and SVG of every figure."""
    mixed = simulate(
        {
            "config": {"max_num_batched_tokens": 64, "num_blocks": 64},
            "requests": [
                {"id": "short", "prompt": {"len": 5}, "max_tokens": 12},
                {"id": "long", "prompt": {"len": 180}, "max_tokens": 6},
                {"id": "late", "prompt": {"len": 4}, "max_tokens": 6, "arrival_step": 2},
            ],
        }
    )
    step = mixed[2]
    focus = reprs.focus_of(mixed.requests)
    yield "packed-batch", svg.packed_batch(step, focus)
    yield "block-tables", svg.block_tables(step, focus)
    yield "timeline", svg.timeline(list(mixed))
    tight = simulate(
        {
            "config": {"max_num_batched_tokens": 64, "num_blocks": 13, "block_size": 8, "enable_prefix_caching": False},
            "requests": [{"id": f"r{i}", "prompt": {"len": 20}, "max_tokens": 24} for i in range(3)],
        }
    )
    yield "preemption", svg.timeline(list(tight))
    shared = simulate(
        {
            "config": {"max_num_batched_tokens": 128, "num_blocks": 48},
            "requests": [
                {
                    "id": f"question {i}",
                    "prompt": {"parts": [{"len": 64, "seed": "common"}, {"len": 20}]},
                    "max_tokens": 8,
                    "arrival_step": 2 * i,
                }
                for i in range(4)
            ],
        }
    )
    yield "prefix-cache", svg.block_tables(shared[7], reprs.focus_of(shared.requests))


def standalone(figure: str) -> str:
    """A file of its own: the views' styles in their light theme, on white."""
    width, height = re.search(r'width="(\d+)" height="(\d+)"', figure).groups()
    style = re.sub(r"@media \(prefers-color-scheme:dark\)\{.*?\}\}", "", reprs.STYLE)
    inner = figure.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="wb-repr" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><style>{style}</style><rect width="100%" height="100%" fill="#fff"/>{inner}</svg>\n'
    )


def main() -> int:
    """Draw or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    check = parser.parse_args().check
    stale = []
    for name, figure in figures():
        path, text = FOLDER / f"{name}.svg", standalone(figure)
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(path.name)
    if stale:
        print(f"these figures are not what the views draw now: {', '.join(stale)}; run {sys.argv[0]}", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
