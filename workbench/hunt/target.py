"""The scheduler under test: by name, its version, what it has, and one run of a workload through it."""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from workbench.hunt.drive import Run
from workbench.hunt.watch import BrokenLaw, Watch
from workbench.hunt.workloads import FEATURES, length_of

MAX_STEPS = 600
"""Steps after which a run is given up as undecided; a small workload takes a tenth of it."""

ALL_FREE = "requests wait forever while every block is free"
"""The place of a run that makes no progress although nobody holds a block."""

_PLAIN = ("caching", "caps")


class Fault(NamedTuple):
    """A broken law in a run.

    Attributes:
        law: The law.
        place: The rule that is broken, or the line that failed, without numbers that vary.
        message: The fault, with the numbers.
        step: Index of the step.
        request_id: The request concerned; "" for none.
    """

    law: str
    place: str
    message: str
    step: int
    request_id: str


class Refused(Exception):
    """The scheduler does not accept the workload."""


@dataclass(frozen=True)
class Target:
    """A scheduler under test.

    Attributes:
        name: As on the command line.
        version: Its version, "" if it has none.
        make: Makes it for a configuration.
        features: Its features, of `workbench.hunt.workloads.FEATURES`.
        is_ours: Workbench's own, which may use the named exceptions.
        folders: The folders of its code.
        policy: "module:Class" of Workbench's policy; "" for vLLM's rules.
    """

    name: str
    version: str
    make: Callable[[Mapping[str, Any]], Any]
    features: Collection[str]
    is_ours: bool = False
    folders: tuple[str, ...] = field(default=())
    policy: str = ""

    def run(
        self,
        workload: dict[str, Any],
        laws: Collection[str] | None = None,
        max_steps: int = MAX_STEPS,
        *,
        dropped: set[str] | None = None,
    ) -> Fault | None:
        """Run a workload.

        Args:
            workload: The workload.
            laws: Names of the laws to check; None for all.
            max_steps: Steps after which the run is given up.
            dropped: Gets the settings that the scheduler does not have.

        Returns:
            The first broken law; None if all hold, or the run was given up.

        Raises:
            Refused: The scheduler does not accept it.
        """
        max_model_len = workload["config"].get("max_model_len")
        if max_model_len and any(length_of(request["prompt"]) >= max_model_len for request in workload["requests"]):
            raise Refused("a prompt leaves no room for a token")
        try:
            scheduler = self.make(workload["config"])
        except Exception as problem:
            if self.is_ours and not isinstance(problem, ValueError):
                raise
            raise Refused(str(problem)) from None
        if dropped is not None:
            dropped.update(getattr(scheduler, "dropped", ()))
        watch = Watch(scheduler, workload["config"], laws=laws, allow_exceptions=self.is_ours)
        run = Run(scheduler, workload, watch)
        try:
            end = run.drive(max_steps)
        except BrokenLaw as problem:
            return _broken(problem.broken, run)
        except Exception as problem:
            if isinstance(problem, ValueError) and run.in_add:
                raise Refused(str(problem)) from None
            return None if laws and "crash" not in laws else _crash(problem, run.step, self.folders)
        finally:
            if hasattr(scheduler, "close"):
                scheduler.close()
        if end != "stuck" or (laws and "progress" not in laws):
            return None
        first = next(iter(run.requests))
        place = ALL_FREE if _all_free(run) else "requests wait forever"
        return Fault("progress", place, f"{len(run.requests)} requests wait forever", run.step, first)


def _all_free(run: Run) -> bool:
    return run.num_free() == run.config.get("num_blocks", 512) - 1


def _broken(broken: Any, run: Run) -> Fault:
    rule = broken.exception or broken.message.partition(":")[0]
    if broken.law == "progress" and _all_free(run):
        rule = ALL_FREE
    return Fault(broken.law, rule, broken.message, broken.step, broken.request_id)


def _crash(problem: Exception, step: int, folders: tuple[str, ...]) -> Fault:
    frames = traceback.extract_tb(problem.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename.startswith(folders)), frames[-1])
    line = (frame.line or "").strip()
    place = f"{Path(frame.filename).name}: {line}"
    said = f"{type(problem).__name__}: {problem} at {Path(frame.filename).name}:{frame.lineno}: {line}"
    return Fault("crash", re.sub(r"\s+", " ", place), said, step, "")


def find_target(name: str, policy: str | None = None) -> Target:
    """The scheduler of a name.

    Args:
        name: "workbench", "vllm", "vllm:module:Class" or "module:factory".
        policy: "module:Class", a policy object for Workbench's scheduler.

    Raises:
        ValueError: There is no such scheduler.
    """
    if policy and name != "workbench":
        raise ValueError(f"--policy is for --scheduler workbench, got --scheduler {name}")
    if name == "workbench":
        return _own(policy)
    if name == "vllm" or name.startswith("vllm:"):
        return _vllm(name)
    factory = _import(name)
    module = importlib.import_module(factory.__module__)
    folder = str(Path(module.__file__ or ".").parent)
    version = str(getattr(module, "__version__", ""))
    return Target(name, version, factory, tuple(getattr(factory, "features", _PLAIN)), folders=(folder,))


def _own(policy: str | None) -> Target:
    import workbench
    from workbench.hunt.own import OwnScheduler

    made = _import(policy) if policy else None
    folder = str(Path(workbench.__file__).parent / "scheduler")
    features = tuple(feature for feature in FEATURES if feature != "too_large")
    version = workbench.__version__
    return Target(
        "workbench", version, lambda config: OwnScheduler(config, made), features, True, (folder,), policy or ""
    )


def _vllm(name: str) -> Target:
    try:
        vllm = importlib.import_module("vllm")
    except ModuleNotFoundError:
        raise ValueError("--scheduler vllm needs vLLM: run workbench hunt in its environment") from None
    from workbench.hunt.vllm_scheduler import VllmScheduler

    chosen = _import(name.partition(":")[2]) if ":" in name else None
    folder = str(Path(vllm.__file__ or "").parent / "v1")
    features = tuple(feature for feature in FEATURES if feature != "partial_prefills")
    version = str(vllm.__version__)
    return Target(name, version, lambda config: VllmScheduler(config, chosen), features, folders=(folder,))


def _import(name: str) -> Any:
    module, separator, attribute = name.partition(":")
    if not separator:
        raise ValueError(f"{name!r} is not a scheduler: give workbench, vllm, vllm:module:Class or module:factory")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as problem:
        raise ValueError(f"{name!r} cannot be imported: {problem}") from None
