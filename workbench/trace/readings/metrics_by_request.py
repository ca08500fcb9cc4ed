"""The metrics of the requests of a run: a dict by id, which is a table of one row for each when it is shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, Any

from workbench.base.on_demand import extra_for, picture
from workbench.base.tables import table_lines, terminal_width
from workbench.base.text import printable
from workbench.trace.fields import FrozenDict
from workbench.trace.find_request import ByRequest
from workbench.trace.readings.latency import Latency
from workbench.trace.readings.metrics import AT_LEAST, RequestMetrics, amount

if TYPE_CHECKING:
    import pandas as pd

MAX_ROWS = 20
"""Maximum number of requests that a table shows."""

HEADINGS = ("request", "TTFT", "ITL mean", "preemptions", "prompt tokens", "output tokens", "end")
"""Headings of the table."""

_OF_TOKENS = ("token_steps", "token_times", "token_before")
_LATENCIES = ("queue", "prefill", "ttft", "decode", "e2e", "age")


class MetricsByRequest(FrozenDict[str, RequestMetrics], ByRequest[RequestMetrics]):
    """Metrics of requests by id, in order of arrival. A notebook and ``print`` show a row for each.

    They are kept with the trace, and refuse changes: ``dict(requests)`` is a copy that takes them.

    Example:
        >>> from workbench import simulate
        >>> requests = [{"id": name, "prompt": {"len": 20}, "max_tokens": 3} for name in "ab"]
        >>> simulate({"requests": requests}).metrics().requests
        request    TTFT  ITL mean  preemptions  prompt tokens  output tokens  end
        a        1 step    1 step            0             20              3  hit max_tokens
        b        1 step    1 step            0             20              3  hit max_tokens
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    @property
    def rows(self) -> Iterator[tuple[str, ...]]:
        """The cells of the first requests, in the order of `HEADINGS`."""
        for name, request in islice(self.items(), MAX_ROWS):
            ttft, unit = request.at_least("ttft"), "s" if request.token_times else "steps"
            gaps = request.gaps(unit)
            yield (
                printable(name),
                "-" if ttft is None else f"{'' if request.ttft else AT_LEAST}{_words(ttft)}",
                amount(fmean(gaps), unit) if gaps else "-",
                f"{request.num_preemptions:,}",
                f"{request.num_prompt_tokens:,}",
                f"{request.num_output_tokens:,}{request.of_part}",
                request.end,
            )

    @property
    def more(self) -> str:
        """The number of requests that the table leaves out; "" for none."""
        return f"... and {len(self) - MAX_ROWS:,} more" if len(self) > MAX_ROWS else ""

    def to_pandas(self) -> pd.DataFrame:
        """One row per request: its metrics by name, its latencies in steps and in seconds, and its mean ITL.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        with extra_for("to_pandas()"):
            import pandas as pd
        names = [each.name for each in fields(RequestMetrics) if each.name not in (*_LATENCIES, *_OF_TOKENS)]
        columns: dict[str, list[Any]] = {name: [getattr(one, name) for one in self.values()] for name in names}
        columns["request_id"] = list(self)
        columns["num_output_tokens"] = [one.num_output_tokens for one in self.values()]
        for name in _LATENCIES:
            found: list[Latency | None] = [getattr(one, name) for one in self.values()]
            columns[f"{name}_steps"] = [one and one.steps for one in found]
            columns[f"{name}_seconds"] = [one and one.seconds for one in found]
        for unit, title in (("steps", "itl_mean_steps"), ("s", "itl_mean_seconds")):
            columns[title] = [fmean(gaps) if (gaps := one.gaps(unit)) else None for one in self.values()]
        whole = [name for name in columns if name.endswith(("_step", "_steps")) and name != "itl_mean_steps"]
        kinds = dict.fromkeys(whole, "Int64") | {name: "float64" for name in columns if name.endswith("_seconds")}
        return pd.DataFrame(columns).astype(kinds)

    def __repr__(self) -> str:
        if not self:
            return "no request"
        lines = table_lines([HEADINGS, *self.rows], width=terminal_width(), left=(0, len(HEADINGS) - 1))
        return "\n".join([*lines, *([self.more] if self.more else [])])

    def _repr_html_(self) -> str | None:
        return picture("MetricsByRequest", self)


def _words(latency: Latency) -> str:
    return amount(latency.steps, "steps") if latency.seconds is None else amount(latency.seconds, "s")
