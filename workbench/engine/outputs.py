"""Outputs of requests in the containers that people expect, which a notebook draws as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from workbench.base.on_demand import picture
from workbench.base.text import counted
from workbench.trace.find_request import ByRequest
from workbench.trace.readings.narrate import end_of

if TYPE_CHECKING:
    from workbench.engine.output_processor import RequestOutput
    from workbench.trace import Trace

MAX_LINES = 20
"""Maximum number of outputs that a repr has a line for."""

MAX_CHARACTERS = 60
"""Maximum number of characters of a text in a repr."""


class Outputs(list["RequestOutput"]):
    """A list of outputs.

    Args:
        outputs: The outputs.
        trace: The trace with their steps, for the times in the table.
    """

    def __init__(self, outputs: Iterable[RequestOutput], trace: Trace) -> None:
        super().__init__(outputs)
        self.trace = trace

    def __repr__(self) -> str:
        return "\n".join(_lines(self, self.trace)) or "no outputs"

    def _repr_html_(self) -> str | None:
        return picture("Outputs", self)


class OutputsByRequest(ByRequest["RequestOutput"]):
    """A dictionary of outputs by request id, otherwise like `Outputs`."""

    def __init__(self, outputs: Mapping[str, RequestOutput], trace: Trace) -> None:
        super().__init__(outputs)
        self.trace = trace

    def __repr__(self) -> str:
        return "\n".join(_lines(list(self.values()), self.trace)) or "no outputs"

    def _repr_html_(self) -> str | None:
        return picture("Outputs", Outputs(self.values(), self.trace))

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)


def _lines(outputs: list[RequestOutput], trace: Trace) -> Iterable[str]:
    for output in outputs[:MAX_LINES]:
        text = output.text if len(output.text) <= MAX_CHARACTERS else f"{output.text[:MAX_CHARACTERS]}…"
        end = end_of(output, trace.requests)
        yield f"{output.request_id}: {text!r}, {counted(len(output.token_ids), 'token')}, {end}"
    if len(outputs) > MAX_LINES:
        yield f"and {len(outputs) - MAX_LINES} more"
