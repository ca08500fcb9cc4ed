"""Stalls: steps that take many times what their contents explain, with the time before them.

The machine stood still then: garbage was collected, memory was paged in, or another program had the processor. No
request is behind a stall, and no setting of the scheduler removes it. So an explanation counts the excess as a separate
cause, a fit leaves the step out, and a prediction has none.

A step's contents are priced by a fit of relative errors, which hardly follows a stall.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.base.text import counted
from workbench.simulation.costs.fit import STALL_FACTOR, STALL_SECONDS
from workbench.simulation.costs.slow_steps import Compared, compare_steps
from workbench.trace import Trace
from workbench.trace.readings.metrics import amount


@dataclass(frozen=True, repr=False)
class Stall:
    """A step that took many times what its contents explain.

    Attributes:
        step: The step.
        seconds: Its duration, the time before it included in which the engine had work.
        expected: The duration that its contents explain.
        num_tokens: Rows of its batch.
        time: When it began, in seconds since the start of the trace.
        causes: The causes in the machine that a recorder of vLLM could count; "" if none is known.
        before: The part of ``seconds`` in which no step ran: the engine stood still before this one.
    """

    step: int
    seconds: float
    expected: float
    num_tokens: int
    time: float
    causes: str = ""
    before: float = 0.0

    @property
    def excess(self) -> float:
        """The seconds that its contents do not explain."""
        return self.seconds - self.expected

    @property
    def share_of_step(self) -> float:
        """The share of the step's own duration that its contents explain."""
        own = self.seconds - self.before
        return min(1.0, self.expected / own) if own else 1.0

    def __repr__(self) -> str:
        return f"Stall({self})"

    def __str__(self) -> str:
        if self.before > self.excess / 2:
            text = f"no step ran for {amount(self.before, 's')} before step {self.step}, which had work"
        else:
            tokens = counted(self.num_tokens, "token")
            verb, took = "explains" if self.num_tokens == 1 else "explain", amount(self.seconds, "s")
            text = f"step {self.step} took {took}; its {tokens} {verb} {amount(self.expected, 's')}"
        return f"{text}; {self.causes}" if self.causes else text


def causes_of(facts: Mapping[str, Any]) -> str:
    """The causes in a supplement "host" as a sentence part; short ones are left out.

    The facts are seconds of collecting garbage, of waiting for a CPU, and of CPU time that the hypervisor gave to other
    machines, and pages read from disk.

    Example:
        >>> causes_of({"collecting": 2.9, "cpu_wait": 0.004, "major_faults": 12000})
        'garbage was collected for 2.9 s, 12000 pages were read from disk'
    """
    known = {name: facts.get(name, 0) for name in ("collecting", "cpu_wait", "steal", "major_faults")}
    known = {name: value for name, value in known.items() if isinstance(value, int | float)}
    said = [
        text.format(amount(known[name], "s")) for name, text in _SECONDS.items() if known.get(name, 0) >= MIN_SECONDS
    ]
    if (pages := known.get("major_faults", 0)) >= MIN_PAGES:
        said.append(f"{pages:.0f} pages were read from disk")
    return ", ".join(said)


MIN_SECONDS, MIN_PAGES = 0.02, 100

_SECONDS = {
    "collecting": "garbage was collected for {}",
    "cpu_wait": "the scheduler's thread waited {} for a CPU",
    "steal": "the hypervisor gave {} of CPU time to others",
}


def _standing_out(compared: Compared) -> dict[int, float]:
    """Steps that took many times what their contents explain, by a relative fit or by steps like them nearby.

    The second finds more if no fit holds. A step that is usual by it does not count.
    """
    steps, expected = compared.steps, compared.expected
    found = {
        index: seconds
        for index, seconds in compared.stalled.items()
        if expected[index].ground or steps.pauses[index] or steps.seconds[index] >= 2 * expected[index].seconds
    }
    late = {
        index: seconds
        for index, seconds in compared.slow.items()
        if steps.seconds[index] >= STALL_FACTOR * seconds and steps.seconds[index] - seconds >= STALL_SECONDS
    }
    return late | found


def stalls(trace: Trace) -> tuple[Stall, ...]:
    """The steps that took many times what their contents explain, in order.

    Args:
        trace: A trace with timings; a trace without them, or of few steps, has no stalls. Those of a slice are the
            whole trace's.

    Example:
        >>> from workbench import simulate
        >>> from workbench import CostModel
        >>> requests = [{"id": "a", "prompt": {"len": 100}, "max_tokens": 40}]
        >>> simulate({"requests": requests}, cost_model=CostModel(fixed=0.1)).stalls()
        ()
    """
    compared = compare_steps(trace)
    steps = compared.steps
    found = []
    for record, index, expected in compared.of_trace(trace, _standing_out(compared)):
        own, before = steps.seconds[index], steps.pauses[index]
        if before and own < STALL_FACTOR * expected:  # the pause alone is the stall
            expected = own
        found.append(
            Stall(
                record.step,
                own + before,
                expected,
                record.num_tokens,
                record.time - before,
                causes_of(trace.supplement(record.step, "host") or {}),
                before,
            )
        )
    return tuple(found)
