"""The part of the playground that runs in the page: it simulates, compares and explains, and answers with packets.

The page sends one message at a time and gets one answer. A message is JSON with a ``command``; a recording comes as
bytes beside it. An answer is JSON, the packet of the run on display and the packet of the run it is compared with.
"""

from __future__ import annotations

import ast
import json
import logging
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from pprint import pformat
from typing import Any, NamedTuple

from workbench.analysis.explain import explain
from workbench.analysis.fork import fork, recorded_config
from workbench.base.field_checks import choice, json_object
from workbench.config import EngineConfig
from workbench.scheduler import policies
from workbench.scheduler.policy import SchedulingPolicy
from workbench.simulation.arrivals import Arrival
from workbench.simulation.costs.cost_model import CostModel
from workbench.simulation.simulate import next_token, simulate, simulate_requests
from workbench.simulation.workload import read_simulation
from workbench.trace import Trace
from workbench.trace.errors import TraceError
from workbench.trace.readings.compare import compare
from workbench.trace.readings.metrics_collector import metrics
from workbench.viz.duel import MEASURES, outcome
from workbench.viz.layout.columns import columns_of
from workbench.viz.layout.comparison import comparison_facts
from workbench.viz.layout.packet import encode_packet, trace_facts

MAX_STEPS = 20_000
"""Maximum number of steps of a simulation in the page."""

POLICY_FILE = "your policy"
"""Name of the policy's source in error messages."""


class Answer(NamedTuple):
    """The answer to a message.

    Attributes:
        facts: JSON: ``error``, or what the command returns.
        packet: The run on display; None if it has not changed.
        other: The run that is compared with it; None for none.
    """

    facts: str
    packet: bytes | None = None
    other: bytes | None = None


class Session:
    """One page: the recording that is open, the pinned run, and the newest run.

    Attributes:
        trace: The newest run; None before the first.
    """

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self._recording: Trace | None = None
        self._pinned: Trace | None = None
        self._shown: Trace | None = None
        self._run = 0
        self._cost_model: CostModel | None = None
        self._workload = ""
        self._arrivals: list[Arrival] = []

    def handle(self, message: str, content: bytes | None = None) -> Answer:
        """Carry out a command of the page. A mistake in its values becomes ``error``; nothing is raised for it."""
        given = json.loads(message)
        command: Callable[..., Answer] = getattr(self, f"_do_{given.pop('command')}")
        if content is not None:
            given["content"] = content
        notes = _Notes()
        logging.getLogger("workbench").addHandler(notes)
        begin = time.perf_counter()
        try:
            answer = command(**given)
        except (ValueError, TraceError, OSError) as problem:
            return Answer(json.dumps({"error": str(problem)}))
        except SyntaxError as problem:
            return Answer(json.dumps({"error": f"{POLICY_FILE}, line {problem.lineno}: {problem.msg}"}))
        finally:
            logging.getLogger("workbench").removeHandler(notes)
        seconds = time.perf_counter() - begin
        facts = json.loads(answer.facts) | {"seconds": seconds, "notes": notes.texts}
        return answer._replace(facts=json.dumps(facts))

    # -- commands --------------------------------------------------------------------------------------------------

    def _do_run(self, workload: str, config: Mapping[str, Any] | None = None, policy: str = "") -> Answer:
        """Simulate the workload, or the open recording, under a configuration and a policy."""
        rules = read_policy(policy) if policy.strip() else None
        changes = dict(config or {})
        if self._recording is not None:
            json_object("config", changes, tuple(EngineConfig().to_dict()))
            before = recorded_config(self._recording).to_dict()
            changes = {name: value for name, value in changes.items() if before[name] != value}
            if rules is not None:
                changes["policy"] = rules
            self.trace = fork(self._recording, **changes) if changes else self._recording
            return self._answer()
        self.trace = self._simulate(workload, changes, rules)
        return self._answer()

    def _simulate(self, workload: str, changes: Mapping[str, Any], policy: SchedulingPolicy | None) -> Trace:
        """Simulate a workload. Its requests are read once: a moved slider changes the configuration alone."""
        content = read_workload_text(workload)
        merged = {**(content.get("config") or {}), **changes}
        if "generate" in content:
            _, _, self._cost_model = read_simulation(content)
            return simulate({**content, "config": merged}, policy=policy, max_steps=MAX_STEPS)
        if workload != self._workload:
            _, arrivals, self._cost_model = read_simulation({**content, "config": {}})
            self._workload, self._arrivals = workload, list(arrivals)
        config, _, _ = read_simulation({"config": merged, "requests": []})
        return simulate_requests(
            config, self._arrivals, next_token, cost_model=self._cost_model, policy=policy, max_steps=MAX_STEPS
        )

    def _do_open(self, name: str, content: bytes) -> Answer:
        """Open a recording; later runs are forks of it."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / ("recording.jsonl.gz" if content[:2] == b"\x1f\x8b" else "recording.jsonl")
            path.write_bytes(content)
            try:
                trace = Trace.load(path)
            except TraceError as problem:
                raise TraceError(str(problem).replace(str(path), name)) from None
        if not len(trace):
            raise TraceError(f"{name} holds no steps")
        self._recording = self.trace = trace
        self._pinned = None
        return self._answer(recording=name, config=recorded_config(trace).to_dict())

    def _do_close(self) -> Answer:
        """Close the recording."""
        self._recording = self._pinned = self._shown = self.trace = None
        return Answer("{}")

    def _do_pin(self) -> Answer:
        """Keep the newest run: later ones are compared with it."""
        self._pinned = self.trace
        return self._answer(measures=list(MEASURES))

    def _do_unpin(self) -> Answer:
        """Show the newest run alone."""
        self._pinned = None
        return self._answer()

    def _do_settle(self, measure: str) -> Answer:
        """The winner of a duel of the pinned run and the newest, and the sentence with both values."""
        first, other = self._on_display()
        if self._pinned is None or other is None:
            raise ValueError("a duel needs two runs: pin one as A, and change something for B")
        winner, told = outcome(compare(first, other), choice("measure", measure, tuple(MEASURES)))
        return Answer(json.dumps({"winner": winner, "told": told}))

    def _do_numbers(self) -> Answer:
        """The numbers of the runs on display; the page asks for them when it has drawn the runs."""
        first, other = self._on_display()
        return Answer(json.dumps({"summary": _summary(first), "other": other and _summary(other)}))

    def _do_explain(self, request: str) -> Answer:
        """Say why a request of the newest run took as long as it did."""
        if self.trace is None:
            raise ValueError("there is no run to explain yet")
        model = self._cost_model if self._recording is None else None
        return Answer(json.dumps({"text": repr(explain(self.trace, request, model))}))

    def _do_python(self, workload: str, config: Mapping[str, Any] | None = None, policy: str = "") -> Answer:
        """The cell of a notebook that does what the page does."""
        return Answer(json.dumps({"text": python_cell(read_workload_text(workload), dict(config or {}), policy)}))

    # -- answers ---------------------------------------------------------------------------------------------------

    def _on_display(self) -> tuple[Trace, Trace | None]:
        """The newest run alone, or the pinned one (or the recording) and the newest."""
        if self.trace is None:
            raise ValueError("there is no run yet")
        first = self._pinned or self._recording or self.trace
        return first, self.trace if self.trace is not first else None

    def _answer(self, **facts: Any) -> Answer:
        """The packets of the runs on display."""
        first, other = self._on_display()
        newest = first if other is None else other
        packet = second = None
        if first is not self._shown or other is None:
            self._run += 1
            extra = {"facts": trace_facts(first) | {"run": self._run}}
            packet = encode_packet(columns_of(first), extra=extra)
            self._shown = first
        compared: dict[str, Any] = {}
        if other is not None:
            compared = comparison_facts(first, other)
            self._run += 1  # the page draws this one, and outlines the first
            facts_of_other = trace_facts(other) | {"run": self._run}
            second = encode_packet(columns_of(other), extra={"facts": facts_of_other, "comparison": compared})
        facts |= {
            "verdict": compared.get("refused") or compared.get("verdict", ""),
            "num_steps": len(newest),
            "requests": list(newest.requests),
            "end": newest.end,
        }
        return Answer(json.dumps(facts), packet, second)


class _Notes(logging.Handler):
    """Collects what the package logs, such as an invalid answer of a policy."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        problem = record.exc_info[1] if record.exc_info else None
        why = "".join(traceback.format_exception_only(problem)).strip() if problem else ""
        self.texts.append(f"{record.getMessage()}{f' ({why})' if why else ''}")


def _summary(trace: Trace) -> dict[str, Any]:
    """The numbers of a run that the page shows."""
    return asdict(metrics(trace).summary)


def read_workload_text(text: str) -> dict[str, Any]:
    """A workload from the text of the editor.

    Raises:
        ValueError: It is not a JSON object; the message names the line.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as problem:
        raise ValueError(f"workload, line {problem.lineno}, column {problem.colno}: {problem.msg}") from None
    except RecursionError:
        raise ValueError("workload: it nests lists or objects too deep") from None
    return dict(json_object("workload", content, ("config", "requests", "generate", "cost_model")))


def read_policy(source: str) -> SchedulingPolicy:
    """The policy that a text defines: its last class, or the name of one in ``workbench.scheduler.policies``.

    Raises:
        SyntaxError: The text is not Python.
        ValueError: It raises, or defines no policy that can be made without arguments.
    """
    if source.strip().isidentifier():
        names = [name for name, kind in vars(policies).items() if _is_policy(kind)]
        return getattr(policies, choice("policy", source.strip(), names))()
    tree = ast.parse(source, POLICY_FILE)
    names_space: dict[str, Any] = {"SchedulingPolicy": SchedulingPolicy, "__name__": "playground"}
    try:
        exec(compile(tree, POLICY_FILE, "exec"), names_space)  # noqa: S102 - the visitor's policy, in the visitor's page
        found = [kind for kind in names_space.values() if _is_policy(kind)]
        if not found:
            raise ValueError("it defines no subclass of SchedulingPolicy")
        return found[-1]()
    except Exception as problem:
        lines = [frame.lineno for frame in traceback.extract_tb(problem.__traceback__) if frame.filename == POLICY_FILE]
        where = f", line {lines[-1]}" if lines else ""
        kind = "" if isinstance(problem, ValueError) and not lines else f"{type(problem).__name__}: "
        raise ValueError(f"{POLICY_FILE}{where}: {kind}{problem}") from None


def python_cell(workload: Mapping[str, Any], config: Mapping[str, Any], policy: str = "") -> str:
    """The cell of a notebook that runs a workload under a configuration and a policy, and shows it."""
    policy = policy.strip()
    if policy.isidentifier():
        lines = [f"from workbench import {policy}, simulate"]
    elif policy:
        lines = ["from workbench import SchedulingPolicy, simulate", "", "", policy, ""]
    else:
        lines = ["from workbench import simulate"]
    merged = {**workload, "config": {**(workload.get("config") or {}), **config}}
    lines += ["", f"workload = {pformat(merged, width=110, sort_dicts=False)}"]
    if policy:
        classes = [node.name for node in ast.parse(policy).body if isinstance(node, ast.ClassDef)]
        name = policy if policy.isidentifier() else classes[-1] if classes else "SchedulingPolicy"
        lines.append(f"trace = simulate(workload, policy={name}())")
    else:
        lines.append("trace = simulate(workload)")
    return "\n".join([*lines, "trace.watch()", ""])


def _is_policy(kind: Any) -> bool:
    return (
        isinstance(kind, type)
        and issubclass(kind, SchedulingPolicy)
        and kind is not SchedulingPolicy
        and not kind.__name__.startswith("_")
    )
