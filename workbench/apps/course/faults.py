"""Twelve faults of a scheduler, for notebook 17. Hunt before you read further.

Each is one changed line of one function of ``workbench.scheduler``. The reader gets the code of the function with its
fault, hunts it, reads the smallest case, repairs the code, and hunts again.
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple
from unittest.mock import patch

from workbench.analysis.hunt.finding import workload_text
from workbench.analysis.hunt.records import record_run
from workbench.analysis.hunt.search import Search
from workbench.analysis.hunt.target import Fault as BrokenLaw
from workbench.analysis.hunt.target import find_target
from workbench.apps.course.verdict import Verdict
from workbench.trace import Trace
from workbench.trace.laws import LAWS
from workbench.trace.readings.narrate import narrate

NUM_WORKLOADS = 400
"""Random workloads of a hunt; a fault of the list takes a tenth of them."""


class Fault(NamedTuple):
    """A fault: in a function of a module of ``workbench.scheduler``, ``right`` became ``wrong``."""

    module: str
    function: str
    right: str
    wrong: str


FAULTS = {
    "A": Fault("queues", "Queues.preempt", "self.waiting.put_back(request)", "self.waiting.add(request)"),
    "B": Fault("block_pool", "BlockPool.get_new_blocks", "self.evict(block)", "pass"),
    "C": Fault("kv_cache_manager", "KVCacheManager.refuse", "None if needed <= num_free", "None if needed < num_free"),
    "D": Fault("block_pool", "BlockPool.touch", "self._free.pop(block, None)", "pass"),
    "E": Fault("queues", "ServiceOrder.victim", "running[-1]", "running[0]"),
    "F": Fault("outputs", "check_stop", ">= request.max_num_tokens", "> request.max_num_tokens"),
    "G": Fault("kv_cache_groups", "GroupManager.num_admission_blocks", "(cached[skipped:])", "(())"),
    "H": Fault("kv_cache_manager", "KVCacheManager.free", "in request.block_tables:", "in request.block_tables[:1]:"),
    "I": Fault("kv_cache_manager", "KVCacheManager._extend_hashes", "request.cache_salt", '""'),
    "J": Fault("in_flight", "InFlight.preempted", "flight.placeholders = 0", "pass"),
    "K": Fault("sliding_window", "SlidingWindow.num_skipped_blocks", "- self._window + 1", "- self._window + 2"),
    "L": Fault("queues", "Queues.abort", "self.running.remove(request)", "pass"),
}  # fmt: skip
"""Every fault by its letter."""


@dataclass(frozen=True)
class Case:
    """The smallest workload that breaks a law.

    Attributes:
        broken: The law that it breaks, with the step and the request.
        workload: The workload, for `simulate()`.
        trace: The run up to the step that breaks the law.
        num_workloads: Number of random workloads until the law was first broken.
    """

    broken: BrokenLaw
    workload: dict[str, Any]
    trace: Trace
    num_workloads: int

    @property
    def story(self) -> str:
        """The law, the fault with its numbers, the workload, and a sentence for each step."""
        protects = next(law.protects for law in LAWS if law.name == self.broken.law)
        steps = "\n".join(narrate(record, self.trace.requests) for record in self.trace)
        return (
            f"Workload {self.num_workloads} breaks the law of {self.broken.law}: {protects}\n"
            f"Step {self.broken.step}: {self.broken.message}\n\n{workload_text(self.workload)}\n{steps}"
        )

    def __repr__(self) -> str:
        return self.story

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre-wrap">{escape(self.story)}</pre>'


def code_of(name: str) -> str:
    """The code of the function that has a fault, with the fault.

    Args:
        name: "A" to "L".
    """
    fault = FAULTS[name]
    text = textwrap.dedent(inspect.getsource(_original(fault)))
    assert fault.right in text, f"{fault.function} has changed: {fault.right!r} is gone"
    return text.replace(fault.right, fault.wrong)


def hunt_code(name: str, code: str | None = None, *, workloads: int = NUM_WORKLOADS, seed: int = 0) -> Case | None:
    """Hunt a scheduler in which one function has other code.

    Args:
        name: The letter of the fault.
        code: Code for its function; None for the code with the fault.
        workloads: Largest number of random workloads.
        seed: Chooses them.

    Returns:
        The smallest case of the first broken law; None if all laws hold.

    Raises:
        ValueError: The code is not that of the function.
    """
    with _planted(name, code_of(name) if code is None else code):
        search = _UntilFound(find_target("workbench"), workloads=workloads, seed=seed)
        if not (found := search.run()):
            return None
        trace = record_run(search.target, found[0].workload)
        return Case(found[0].fault, found[0].workload, trace, found[0].num_workloads)


def check_repair(name: str, code: str) -> Verdict:
    """Notebook 17: ``code`` is the repaired code of a function; it is hunted with workloads not seen before."""
    try:
        case = hunt_code(name, code, seed=17)
    except ValueError as problem:
        return Verdict(False, str(problem))
    if case is not None:
        broken = case.broken
        return Verdict(False, f"the law of {broken.law} is broken in step {broken.step}: {broken.message}.")
    return Verdict(True, f"{NUM_WORKLOADS} random workloads, and every law holds.")


class _UntilFound(Search):
    """A search that ends with its first finding."""

    @property
    def over(self) -> bool:
        return bool(self.found) or super().over


def _owner(fault: Fault) -> tuple[Any, str]:
    """The class or module that has the function, and the function's name there."""
    module = importlib.import_module(f"workbench.scheduler.{fault.module}")
    *classes, name = fault.function.split(".")
    return (getattr(module, classes[0]) if classes else module), name


def _original(fault: Fault) -> Callable[..., Any]:
    owner, name = _owner(fault)
    function: Callable[..., Any] = getattr(owner, name)
    return function


@contextmanager
def _planted(name: str, code: str) -> Iterator[None]:
    fault = FAULTS[name]
    owner, function = _owner(fault)
    made: dict[str, Any] = {}
    try:
        compiled = compile(code, f"<your {function}>", "exec", flags=__future__.annotations.compiler_flag)
        exec(compiled, _original(fault).__globals__, made)  # noqa: S102 (the reader's own code)
    except SyntaxError as problem:
        raise ValueError(f"line {problem.lineno}: {problem.msg}") from None
    if not callable(made.get(function)):
        raise ValueError(f"the code must define {function}(), as code_of({name!r}) does")
    with patch.object(owner, function, made[function]):
        yield
