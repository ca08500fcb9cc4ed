"""The scheduler under test: by name, its version, what it has, and one run of a workload through it."""

from __future__ import annotations

import importlib
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import workbench
from workbench.analysis.hunt.drive import Run
from workbench.analysis.hunt.meetings import Meetings
from workbench.analysis.hunt.watch import BrokenLaw, Watch
from workbench.analysis.hunt.workloads import FEATURES, length_of
from workbench.base.text import counted
from workbench.trace.laws import EXCEPTIONS

MAX_STEPS = 600
"""Steps after which a run is given up as undecided; a small workload takes a tenth of it."""

MAX_SECONDS = 4.0
"""CPU time after which a step is said not to end; a small workload takes a hundredth of it."""

ALL_FREE = "requests wait forever while every block is free"
"""The place of a run that makes no progress although nobody holds a block."""

_PACKAGE = str(Path(workbench.__file__).parent)

_PLAIN = ("caching", "caps")

_WITH_LOADS = ("crash", "limits", "exactly_once", "progress")
"""The laws that are judged while KV comes from elsewhere; the others do not know of it."""


class Fault(NamedTuple):
    """A broken law in a run.

    Attributes:
        law: The law.
        place: The rule that is broken, or the line that failed, without numbers that vary.
        message: The fault, with the numbers.
        step: Index of the step.
        request_id: The request concerned; "" for none.
        traceback: Python's traceback of a crash; "" for every other law.
    """

    law: str
    place: str
    message: str
    step: int
    request_id: str
    traceback: str = ""


@dataclass
class Tally:
    """Totals of a search, in seconds of processor time.

    Attributes:
        whole: The search.
        seconds: Its runs, the laws included.
        in_laws: The laws.
        dropped: Settings that the scheduler under test does not have.
    """

    whole: float = 0.0
    seconds: float = 0.0
    in_laws: float = 0.0
    dropped: set[str] = field(default_factory=set)

    def add(self, scheduler: Any, seconds: float, in_laws: float) -> None:
        """Add a run."""
        self.seconds += seconds
        self.in_laws += in_laws
        self.dropped.update(getattr(scheduler, "dropped", ()))

    def merge(self, other: Tally) -> None:
        """Add the totals of another search."""
        self.whole += other.whole
        self.seconds += other.seconds
        self.in_laws += other.in_laws
        self.dropped |= other.dropped


class Refused(Exception):
    """The scheduler does not accept the workload."""


class ImportedNothing(ValueError):
    """The name of a scheduler or a policy leads to no code."""


class Endless(Exception):
    """A step does not end."""


@contextmanager
def time_limit() -> Iterator[None]:
    """Raise Endless in what takes too much CPU time, where timers exist and this is the main thread."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise Endless("a step does not end")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@dataclass(frozen=True)
class Target:
    """A scheduler under test.

    Attributes:
        name: As on the command line.
        version: Its version, "" if it has none.
        make: Makes it for a configuration.
        features: Its features, of `workbench.analysis.hunt.workloads.FEATURES`.
        is_ours: Workbench's own.
        folders: The folders of its code.
        policy: "module:Class" of Workbench's policy; "" for vLLM's rules.
        allows: The names of the exceptions that it may use.
    """

    name: str
    version: str
    make: Callable[[Mapping[str, Any]], Any]
    features: Collection[str]
    is_ours: bool = False
    folders: tuple[str, ...] = field(default=())
    policy: str = ""
    allows: Collection[str] = ()

    def run(
        self,
        workload: dict[str, Any],
        laws: Collection[str] | None = None,
        max_steps: int = MAX_STEPS,
        *,
        tally: Tally | None = None,
        meetings: Meetings | None = None,
    ) -> Fault | None:
        """Run a workload.

        Args:
            workload: The workload.
            laws: Names of the laws to check; None for all.
            max_steps: Steps after which the run is given up.
            tally: Takes the time, and the settings that the scheduler does not have.
            meetings: Takes the events of the run.

        Returns:
            The first broken law; None if all hold, or the run was given up.

        Raises:
            Refused: The scheduler does not accept it.
        """
        max_model_len = workload["config"].get("max_model_len")
        if max_model_len and any(length_of(request["prompt"]) >= max_model_len for request in workload["requests"]):
            raise Refused("a prompt leaves no room for a token")
        if any("remote" in request for request in workload["requests"]):
            laws = [law for law in _WITH_LOADS if not laws or law in laws]
            if not laws:
                return None
        began = time.process_time()
        try:
            scheduler = self.make(workload["config"])
        except Exception as problem:
            if self.is_ours and not isinstance(problem, ValueError):
                return crash_of(problem, 0, self.folders)
            raise Refused(str(problem)) from None
        watch = Watch(scheduler, workload["config"], laws=laws, allow_exceptions=self.allows, meetings=meetings)
        run = Run(scheduler, workload, watch)
        try:
            with time_limit():
                end = run.drive(max_steps)
        except BrokenLaw as problem:
            return _broken(problem.broken, run)
        except Exception as problem:
            if isinstance(problem, ValueError) and run.in_add:
                raise Refused(str(problem)) from None
            return None if laws and "crash" not in laws else crash_of(problem, run.step, self.folders)
        finally:
            if hasattr(scheduler, "close"):
                scheduler.close()
            if meetings is not None:
                meetings.finish()
            if tally is not None:
                tally.add(scheduler, time.process_time() - began, watch.seconds)
        if end != "stuck" or (laws and "progress" not in laws):
            return None
        first, num = next(iter(run.requests)), len(run.requests)
        place = ALL_FREE if _all_free(run) else "requests wait forever"
        return Fault("progress", place, f"{counted(num, 'request')} wait{'s' * (num == 1)} forever", run.step, first)


def _all_free(run: Run) -> bool:
    return run.num_free() == run.config.get("num_blocks", 512) - 1


def _broken(broken: Any, run: Run) -> Fault:
    rule = broken.exception or broken.message.partition(":")[0]
    if broken.law == "progress" and _all_free(run):
        rule = ALL_FREE
    return Fault(broken.law, rule, broken.message, broken.step, broken.request_id)


def crash_of(problem: Exception, step: int, folders: tuple[str, ...]) -> Fault:
    """The exception that ended a run, with the last line of the code under test."""
    frames = traceback.extract_tb(problem.__traceback__)
    under_test = [frame for frame in frames if any(_is_in(frame.filename, folder) for folder in folders)]
    others = [frame for frame in under_test if not _is_in(frame.filename, _PACKAGE)]  # a policy calls what we show it
    frame = (others or under_test or frames)[-1]
    line = (frame.line or "").strip()
    place = str(problem) if isinstance(problem, Endless) else f"{Path(frame.filename).name}: {line}"
    said = f"{type(problem).__name__}: {problem} at {Path(frame.filename).name}:{frame.lineno}: {line}"
    whole = "".join(traceback.format_exception(problem))
    return Fault("crash", re.sub(r"\s+", " ", place), said, step, "", whole)


def _is_in(file: str, folder: str) -> bool:
    """Whether a file belongs to the code of a folder, which may hold an environment with the packages of others."""
    path, home = Path(file), Path(folder)
    return home in path.parents and "site-packages" not in path.relative_to(home).parts


def find_target(
    name: str, policy: str | None = None, allow: Collection[str] | None = None, *, as_part: bool = False
) -> Target:
    """The scheduler of a name.

    Args:
        name: "workbench", "engine", "vllm", "vllm:module:Class" or "module:factory".
        policy: "module:Class", a policy object for Workbench's scheduler.
        allow: The names of the exceptions that it may use; None for every one if it is Workbench's, else for none.
        as_part: It is a part of a comparison: Workbench's decides as vLLM does where that lets requests wait forever,
            and a vLLM that cannot be made is one that refuses every workload.

    Raises:
        ValueError: There is no such scheduler.
    """
    if policy and name not in ("workbench", "engine"):
        raise ValueError(f"--policy is for --scheduler workbench or engine, got --scheduler {name}")
    known = [exception.name for exception in EXCEPTIONS]
    if unknown := sorted(set(allow or ()).difference(known)):
        raise ValueError(f"--allow names {unknown[0]!r}; the exceptions are {', '.join(known)}")
    target = _find(name, policy, as_part)
    return replace(target, allows=tuple((known if target.is_ours else ()) if allow is None else allow))


def _find(name: str, policy: str | None, as_part: bool) -> Target:
    if name in ("workbench", "engine"):
        return _own(name, policy, as_part)
    if name == "vllm" or name.startswith("vllm:"):
        return _vllm(name, as_part)
    factory = _import(name)
    module = importlib.import_module(factory.__module__)
    folders = (str(Path(module.__file__ or ".").parent),)
    version = str(getattr(module, "__version__", ""))
    features = tuple(getattr(factory, "features", _PLAIN))
    return Target(name, version, factory, features, folders=getattr(factory, "folders", folders))


def _own(name: str, policy: str | None, as_vllm: bool) -> Target:
    kind: Any = _import(
        "workbench.analysis.hunt." + ("own:OwnScheduler" if name == "workbench" else "engine:EngineScheduler")
    )
    made = _policy(policy) if policy else None
    folders: tuple[str, ...] = (f"{_PACKAGE}/scheduler", f"{_PACKAGE}/engine")
    if policy:
        module = importlib.import_module(policy.partition(":")[0])
        folders += (str(Path(module.__file__ or ".").parent),)
    features = getattr(kind, "features", tuple(each for each in FEATURES if each not in ("too_large", "loads")))
    version = workbench.__version__
    options: dict[str, Any] = {"as_vllm": True} if as_vllm else {}
    return Target(name, version, lambda config: kind(config, made, **options), features, True, folders, policy or "")


def _policy(name: str) -> Callable[[], Any]:
    from workbench.scheduler.eviction import Eviction
    from workbench.scheduler.policy import SchedulingPolicy

    made = _import(name)
    if not isinstance(shown := made(), (SchedulingPolicy, Eviction)):
        raise ValueError(f"--policy {name!r} makes {shown!r}: it must be a SchedulingPolicy or an Eviction")
    return cast("Callable[[], Any]", made)


def _vllm(name: str, as_part: bool) -> Target:
    try:
        vllm = importlib.import_module("vllm")
    except ModuleNotFoundError:
        raise ValueError("--scheduler vllm needs vLLM: run workbench hunt in its environment") from None
    from workbench.analysis.hunt.vllm_scheduler import VllmScheduler

    chosen = _import(name.partition(":")[2]) if ":" in name else None
    try:  # imports most of vLLM, before the time of a hunt runs
        VllmScheduler({}, chosen).close()
    except Exception as problem:
        if not as_part or isinstance(problem, ImportError):
            raise ValueError(f"vLLM {vllm.__version__} cannot be driven: {type(problem).__name__}: {problem}") from None
    folder = str(Path(vllm.__file__ or "").parent / "v1")
    features = tuple(feature for feature in FEATURES if feature not in ("partial_prefills", "evictions"))
    version = str(vllm.__version__)
    return Target(name, version, lambda config: VllmScheduler(config, chosen), features, folders=(folder,))


def _import(name: str) -> Any:
    module, separator, attribute = name.partition(":")
    if not separator:
        raise ValueError(f"{name!r} is not a scheduler: give workbench, vllm, vllm:module:Class or module:factory")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as problem:
        raise ImportedNothing(f"{name!r} cannot be imported: {problem}") from None
