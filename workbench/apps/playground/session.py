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
from workbench.analysis.fork import fork, recorded_config, why_not_simulated
from workbench.apps.playground.run import MAX_STEPS, MOMENTS, Run, first_step, run_of_fleet
from workbench.base.field_checks import FieldError, choice, integer, json_object
from workbench.base.text import shown
from workbench.config import EngineConfig
from workbench.scheduler import policies
from workbench.scheduler.policy import SchedulingPolicy
from workbench.simulation.arrivals import Arrival
from workbench.simulation.costs.cost_model import CostModel
from workbench.simulation.simulate import next_token, simulate, simulate_requests
from workbench.simulation.workload import read_simulation
from workbench.trace import Trace
from workbench.trace.errors import TraceError
from workbench.trace.readings.metrics_collector import merge_metrics, metrics, summary_in_steps
from workbench.trace.readings.two_sides import BOUNDS
from workbench.trace.run_zero import clock_starts
from workbench.viz.duel import are_unequal, busiest, changes_of_fleets, counts_alone, measure_words, outcome, unit_of
from workbench.viz.layout.columns import columns_of
from workbench.viz.layout.comparison import comparison_facts
from workbench.viz.layout.packet import encode_packet, trace_facts

MAX_REPLICAS = 16
"""Maximum number of replicas in the page: each is a scheduler with a pool, and a row of the picture."""

OTHER_WORKLOAD = (
    "A belongs to another workload, so this run is shown alone: Unpin A, or choose the workload of A again."
)
"""Why a pinned run is not compared with the newest one."""

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
    """One page: the recording that is open, the pinned run, and the newest run."""

    def __init__(self) -> None:
        self._newest: Run | None = None
        self._recording: Run | None = None
        self._pinned: Run | None = None
        self._apart: Run | None = None
        self._shown: Trace | None = None
        self._replica: int | None = None
        self._run = 0
        self._shows = ""
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

    def _do_run(
        self,
        workload: str,
        config: Mapping[str, Any] | None = None,
        policy: str = "",
        replicas: int = 1,
        router: str = "round_robin",
        shows: str = "",
    ) -> Answer:
        """Simulate the workload, or the open recording, under a configuration and a policy, or by a fleet.

        With ``shows``, one of `MOMENTS`, the answer has the first such step of the trace on display.
        """
        self._shows = choice("shows", shows, ("", *MOMENTS))
        check_fleet(replicas, router, policy)
        rules = read_policy(policy) if policy.strip() else None
        changes = dict(json_object("config", {} if config is None else config))
        if self._recording is not None:
            if replicas > 1:
                raise ValueError(f"replicas is {replicas}: a recording is of one replica, so close it or give 1")
            json_object("config", changes, tuple(EngineConfig().to_dict()))
            recording = self._recording.traces[0]
            before = recorded_config(recording).to_dict()
            changes = {name: value for name, value in changes.items() if before[name] != value}
            if rules is not None:
                changes["policy"] = rules
            self._newest = Run((fork(recording, **changes),)) if changes else self._recording
            return self._answer()
        self._newest = self._simulate(workload, changes, rules, replicas, router)
        return self._answer()

    def _simulate(
        self, workload: str, changes: Mapping[str, Any], policy: SchedulingPolicy | None, replicas: int, router: str
    ) -> Run:
        """Simulate a workload. Its requests are read once: a moved slider changes the configuration alone."""
        content = read_workload_text(workload)
        merged = {**(content.get("config") or {}), **changes}
        if "generate" in content:
            given = {**content, "config": merged}
            config, arrivals, self._cost_model = read_simulation(given)
            if replicas == 1:
                return Run((simulate(given, policy=policy, max_steps=MAX_STEPS),))
            return run_of_fleet(config, list(arrivals), self._cost_model, replicas, router)
        if workload != self._workload:
            _, arrivals, self._cost_model = read_simulation({**content, "config": {}})
            self._workload, self._arrivals = workload, list(arrivals)
        config, _, _ = read_simulation({"config": merged, "requests": []})
        if replicas > 1:
            return run_of_fleet(config, self._arrivals, self._cost_model, replicas, router)
        trace = simulate_requests(
            config, self._arrivals, next_token, cost_model=self._cost_model, policy=policy, max_steps=MAX_STEPS
        )
        return Run((trace,))

    def _do_open(self, name: str, content: bytes) -> Answer:
        """Open a recording; later runs are forks of it, unless the answer has a ``refusal``: why there can be none."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / ("recording.jsonl.gz" if content[:2] == b"\x1f\x8b" else "recording.jsonl")
            path.write_bytes(content)
            try:
                trace = Trace.load(path)
            except TraceError as problem:
                raise TraceError(str(problem).replace(str(path), name)) from None
        if not len(trace):
            raise TraceError(f"{name} holds no steps")
        self._recording = self._newest = Run((trace,))
        self._pinned = None
        return self._answer(recording=name, config=recorded_config(trace).to_dict(), refusal=why_not_simulated(trace))

    def _do_close(self) -> Answer:
        """Close the recording."""
        self._recording = self._pinned = self._shown = self._newest = None
        return Answer("{}")

    def _do_pin(self) -> Answer:
        """Keep the newest run: later ones are compared with it.

        The answer has the ``measures`` of a duel; ``counts``, those for a B with other ``bounds`` of a step if the
        ``unit`` of times is a step.
        """
        self._pinned = self._newest
        sides = self._pinned.traces if self._pinned else ()
        offered = {"measures": measure_words(len(sides) or 1), "counts": counts_alone(len(sides) or 1)}
        bounds = {name: sides[0].config.get(name) for name in BOUNDS} if sides else {}
        return self._answer(**offered, unit=unit_of(sides, sides), bounds=bounds)

    def _do_put_away(self) -> Answer:
        """Show the pinned run alone until the next one has run."""
        self._newest = self._pinned
        return self._answer()

    def _do_unpin(self) -> Answer:
        """Show the newest run alone."""
        self._pinned = None
        return self._answer()

    def _do_settle(self, measure: str) -> Answer:
        """The winner of a duel of the pinned run and the newest, and the sentence with both values."""
        first, other = self._on_display()
        if self._is_apart:
            raise ValueError(OTHER_WORKLOAD)
        if self._pinned is None or other is None:
            raise ValueError("a duel needs two runs: pin one as A, and change something for B")
        winner, told = outcome(first.traces, other.traces, measure)
        return Answer(json.dumps({"winner": winner, "told": told}))

    def _do_look(self, replica: int) -> Answer:
        """Show the steps of another replica of the newest run."""
        first, other = self._on_display()
        self._replica = integer("replica", replica, 0, len((other or first).traces) - 1)
        return self._answer()

    def _do_numbers(self) -> Answer:
        """The numbers of the runs on display; the page asks for them when it has drawn the runs.

        The ``unit`` of times is "" for a run without times beside one whose steps do not last equally long: only their
        counts are compared, as in *Compare*. A run that has times, such as a recording, keeps them.
        """
        first, other = self._on_display()
        newest = first if other is None else other
        sides = {"summary": first} if other is None else {"summary": first, "other": other}
        own = facts = {name: _summary(*side.traces) for name, side in sides.items()}
        if len({summary["unit"] for summary in facts.values()}) > 1:
            facts = {name: _summary(*side.traces, in_steps=True) for name, side in sides.items()}
        units = {summary["unit"] for summary in facts.values()}
        if other is not None and units == {"steps"} and are_unequal(first.traces, other.traces):
            facts = {
                name: own[name] if own[name]["unit"] == "s" else summary | {"unit": ""}
                for name, summary in facts.items()
            }
        return Answer(json.dumps({"other": None, **facts, "slowest": newest.slowest, "apart": self._is_apart}))

    def _do_explain(self, request: str) -> Answer:
        """Say why a request of the newest run took as long as it did."""
        if self._newest is None:
            raise ValueError("there is no run to explain yet")
        model = self._cost_model if self._recording is None else None
        return Answer(json.dumps({"text": repr(explain(self._newest.of(request), request, model))}))

    def _do_python(
        self,
        workload: str,
        config: Mapping[str, Any] | None = None,
        pinned: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> Answer:
        """The cell of a notebook that does what the page does.

        Args:
            workload: The workload as text.
            config: Changes of its configuration.
            pinned: The settings of the pinned run, if it is of this workload.
            others: The other settings of the newest run, see `Side`.
        """
        sides = [read_side(config, **others), *([read_side(**json_object("pinned", pinned))] if pinned else [])]
        return Answer(json.dumps({"text": python_cell(read_workload_text(workload), *sides)}))

    # -- answers ---------------------------------------------------------------------------------------------------

    def _on_display(self) -> tuple[Run, Run | None]:
        """The newest run alone, or the pinned one (or the recording) and the newest."""
        if self._newest is None:
            raise ValueError("there is no run yet")
        first = self._pinned or self._recording or self._newest
        return (self._newest, None) if self._is_apart or self._newest is first else (first, self._newest)

    @property
    def _is_apart(self) -> bool:
        """Whether the newest run has other requests than the pinned one, with which it is then not compared."""
        return self._pinned not in (None, self._newest) and self._apart is self._newest

    def _alone(self) -> Answer:
        """The newest run without the pinned one, which has other requests."""
        self._apart = self._newest
        answer = self._answer()
        return answer._replace(facts=json.dumps({**json.loads(answer.facts), "verdict": OTHER_WORKLOAD, "apart": True}))

    def _answer(self, **facts: Any) -> Answer:
        """The packets of the runs on display; of a fleet that of one replica, and a picture of all."""
        first, other = self._on_display()
        newest = first if other is None else other
        facts |= {"num_steps": sum(map(len, newest.traces)), "requests": newest.requests, "end": newest.end}
        if first.is_fleet or newest.is_fleet:
            return self._answer_of_fleets(first, other, facts)
        trace, compared_with = first.traces[0], other.traces[0] if other is not None else None
        facts |= self._opening(newest.traces[0])
        packet = second = None
        if trace is not self._shown or compared_with is None:
            packet = self._packet(trace)
            self._shown = trace
        compared: dict[str, Any] = {}
        if compared_with is not None:  # the page draws this one, and outlines the first
            compared = comparison_facts(trace, compared_with)
            if "refused" in compared:
                return self._alone()
            second = self._packet(compared_with, comparison=compared)
        facts["verdict"] = compared.get("verdict", "")
        return Answer(json.dumps(facts), packet, second)

    def _answer_of_fleets(self, first: Run, other: Run | None, facts: dict[str, Any]) -> Answer:
        """A picture of the replicas of each run, and the packet of the replica of the newest run that is looked at."""
        from workbench.viz.fleet_rows import fleet_svgs  # few pages draw a fleet

        newest = first if other is None else other
        replica = self._replica if self._replica is not None else newest.busiest
        replica = replica if replica < len(newest.traces) else newest.busiest
        sides = [
            {f"replica {i}": trace for i, trace in enumerate(run.traces)} for run in (first, other) if run is not None
        ]
        try:
            facts["verdict"] = "" if other is None else changes_of_fleets(first.traces, other.traces)
        except ValueError:
            return self._alone()
        busy = newest.traces[newest.busiest]
        facts |= {"fleet": fleet_svgs(sides) if busy and busy[-1].end else [], "replica": replica}
        facts["replicas"] = [len(trace.requests) for trace in newest.traces]
        facts["concentration"] = newest.concentration
        self._shown = newest.traces[replica]
        facts |= self._opening(self._shown)
        start = clock_starts(dict(enumerate(newest.traces)))[replica]
        return Answer(json.dumps(facts), self._packet(self._shown, zero=-start))

    def _opening(self, trace: Trace) -> dict[str, Any]:
        """The step at which the page opens a trace, once after a run that said what to show."""
        shows, self._shows = self._shows, ""
        return {"opens_at": first_step(trace, shows)} if shows else {}

    def _packet(self, trace: Trace, zero: float | None = None, **extra: Any) -> bytes:
        """The packet of a run, which has a number that no earlier one had; a replica has the zero of its fleet."""
        self._run += 1
        facts = trace_facts(trace) | {"run": self._run}
        if zero is not None:
            facts["zero"] = zero
        return encode_packet(columns_of(trace), extra={"facts": facts, **extra})


class _Notes(logging.Handler):
    """Collects what the package logs, such as an invalid answer of a policy."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        told, problem = record.getMessage(), record.exc_info[1] if record.exc_info else None
        if problem is not None and str(problem) not in told:
            told += f" ({''.join(traceback.format_exception_only(problem)).strip()})"
        lines = _lines_of(problem)
        self.texts.append(f"{POLICY_FILE}, line {lines[-1]}: {told}" if lines else told)


def _lines_of(problem: BaseException | None) -> list[int]:
    """The lines of the policy's source that a problem went through; it arose in the last."""
    frames = traceback.extract_tb(problem.__traceback__) if problem is not None else ()
    return [frame.lineno for frame in frames if frame.filename == POLICY_FILE and frame.lineno]


def _summary(*traces: Trace, in_steps: bool = False) -> dict[str, Any]:
    """The numbers of a run that the page shows; of a fleet those of all replicas. ``at_work`` leaves out idle time."""
    found = [metrics(trace) for trace in traces]
    whole = found[0] if len(found) == 1 else merge_metrics({str(i): (each, 0.0) for i, each in enumerate(found)})
    summary = summary_in_steps(whole) if in_steps else whole.summary
    more = {"replicas": len(traces), "busiest": busiest(traces), "at_work": summary.clock.at_work}
    return asdict(summary) | more


def check_fleet(replicas: int = 1, router: str = "round_robin", policy: str = "") -> None:
    """Check the settings of a fleet and a policy beside them, also those of a single replica.

    Raises:
        ValueError: One of them is not allowed.
    """
    _text("policy", policy)
    integer("replicas", replicas, 1, MAX_REPLICAS)
    if router != "round_robin":
        from workbench.analysis.fleet.routers import make_router  # few pages run a fleet

        make_router(router)
    if replicas > 1 and policy.strip():
        raise ValueError("a policy in Python runs on one replica: choose vLLM's rules or priority, or 1 replica")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, got {shown(value)}")
    return value


def read_workload_text(text: str) -> dict[str, Any]:
    """A workload from the text of the editor.

    Raises:
        ValueError: It is not a JSON object; the message names the line.
    """
    _text("workload", text)
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
        lines = _lines_of(problem)
        where = f", line {lines[-1]}" if lines else ""
        kind = (
            ""
            if isinstance(problem, FieldError) or (isinstance(problem, ValueError) and not lines)
            else f"{type(problem).__name__}: "
        )
        raise ValueError(f"{POLICY_FILE}{where}: {kind}{problem}") from None


class Side(NamedTuple):
    """The settings of a run of the page, beside its workload."""

    config: Mapping[str, Any] = {}
    policy: str = ""
    replicas: int = 1
    router: str = "round_robin"

    @property
    def has_source(self) -> bool:
        """Whether the policy is Python, not the name of one of Workbench's."""
        return bool(self.policy) and not self.policy.isidentifier()

    @property
    def imports(self) -> list[str]:
        """The names of Workbench that its lines need."""
        if self.replicas > 1:
            return ["simulate_fleet"]
        return ["simulate", *([self.policy or "simulate"] if not self.has_source else ["SchedulingPolicy"])]

    def call(self, config: Mapping[str, Any]) -> str:
        """The call that makes the run, with changes of the workload's configuration."""
        changes = f", config={dict(config)!r}" if config else ""
        if self.replicas > 1:
            return f"simulate_fleet(workload{changes}, replicas={self.replicas}, router={self.router!r})"
        if not self.policy:
            return f"simulate(workload{changes})"
        classes = [node.name for node in ast.parse(self.policy).body if isinstance(node, ast.ClassDef)]
        name = classes[-1] if classes else self.policy if not self.has_source else "SchedulingPolicy"
        return f"simulate(workload{changes}, policy={name}())"


def read_side(config: Mapping[str, Any] | None = None, **others: Any) -> Side:
    """The settings of a run from a message.

    Raises:
        ValueError: One of them is not allowed.
    """
    check_fleet(**others)
    return Side(json_object("config", {} if config is None else config), **others)


def python_cell(workload: Mapping[str, Any], newest: Side, pinned: Side | None = None) -> str:
    """The cell of a notebook that makes the run of the page and shows it, beside a pinned run if there is one."""
    sides = [side._replace(policy=side.policy.strip()) for side in (pinned, newest) if side is not None]
    names = ("a", "b") if pinned else ("run" if newest.replicas > 1 else "trace",)
    are_traces = all(side.replicas == 1 for side in sides)
    imports = {name for side in sides for name in side.imports} | ({"compare"} if pinned and are_traces else set())
    lines, sources = [f"from workbench import {', '.join(sorted(imports))}"], set()
    for number, (name, side) in enumerate(zip(names, sides)):
        if side.has_source and side.policy not in sources:
            sources.add(side.policy)
            lines += ["", "", side.policy, ""]
        if number == 0:
            merged = {**workload, "config": {**(workload.get("config") or {}), **({} if pinned else side.config)}}
            lines += ["", f"workload = {pformat(merged, width=110, sort_dicts=False)}"]
        lines.append(f"{name} = {side.call(side.config if pinned else {})}")
    if pinned:
        lines += ["print(compare(a, b))", "b.watch(other=a)"] if are_traces else ["print(a)", "b"]
    else:
        lines.append("trace.watch()" if are_traces else "run")
    return "\n".join([*lines, ""])


def _is_policy(kind: Any) -> bool:
    return (
        isinstance(kind, type)
        and issubclass(kind, SchedulingPolicy)
        and kind is not SchedulingPolicy
        and not kind.__name__.startswith("_")
    )
