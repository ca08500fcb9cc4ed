"""Parts of the tables that are made from benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
Result = Mapping[str, Any]


loaded: dict[str, Result] = {}
"""The results that `load` has read, by name."""


def load(name: str) -> Result:
    """A result file by name."""
    loaded[name] = result = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    digits = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return digits if "e" not in digits else f"{value:.6f}"


def cell(row: str, values: Result) -> str:
    """The median of a row as a table shows it, "" if an arm has none; latencies per token are in milliseconds."""
    if row not in values:
        return ""
    median = values[row]["median"]
    return number(median * 1000 if row.endswith(("tpot_s", "itl_s")) else median)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def provenance(result: Result, repeats: int) -> str:
    """One line about the origin of the numbers."""
    machine = result["machine"]
    versions = machine["versions"]
    times = f"medians of {repeats} interleaved runs" if repeats > 1 else "one run"
    load_average = result.get("load_average_at_start", machine["load_average"])
    return (
        f"{times}; {machine['cores']} cores of an {machine['processor']}, {machine['system']}, Python "
        f"{machine['python']}, MLX {versions['mlx']}, mlx-lm {versions['mlx-lm']}; load average {load_average:g} "
        "at the start"
    )


def spread(ratio: Result) -> str:
    """A ratio, with its range if it was repeated."""
    range_ = f" ({ratio['min']:.2f} to {ratio['max']:.2f})" if ratio["repeats"] > 1 else ""
    return f"{ratio['median']:.2f}{range_}"
