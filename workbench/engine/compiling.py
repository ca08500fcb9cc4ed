"""Start an engine before its code is compiled, and change to compiled code between two steps.

Compiling takes most of a minute of processor time, once per machine. With nothing kept from an earlier start, an engine
begins with weights in float32 and MLX's own operations, layer by layer, while another process compiles. When that is
done, the packed model is loaded on a thread, and takes over the pool after a step. It computes that step once more, and
stays if its logits agree with those of the first way. Otherwise, or if compiling fails, the engine stays as it is, and
`Compiling.facts` has the reason.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from workbench.base.cache_folder import cache_folder, cached, make_folder
from workbench.base.connected import start_connected
from workbench.base.keyword_fields import BackendName
from workbench.config import EngineConfig
from workbench.engine import compile_process
from workbench.engine.model_runner import ModelRunner
from workbench.engine.packed_batch import PackedBatch
from workbench.kernels.attention.selection import FALLBACK
from workbench.kernels.cpu.attention.object_code import NotCompiled, elsewhere, remove_parts, without_compiling
from workbench.models.load import LoadedModel, load_model
from workbench.models.preflight import WORST_ROW

if TYPE_CHECKING:
    import subprocess
    from multiprocessing.connection import Connection

log = logging.getLogger("workbench")

VARIABLE = "WORKBENCH_WAIT_FOR_COMPILED"
"""Environment variable: "1" makes every engine of the process wait for compiled code."""

MAX_BYTES = 256 << 20
"""Size of files from which an engine waits: in float32, weights are up to eight times as large."""

CUT_OFF = "cut_off"
"""File in the folder of compiled code: an engine was closed before its code was compiled."""

MAX_COMPARED_ROWS = 64
"""Rows of logits of a step by which both ways are compared; a step with more is left out."""


def why_wait(model: str | Path | LoadedModel, config: EngineConfig, options: Mapping[str, Any], device: str) -> str:
    """Why an engine waits for compiled code; empty if it can start without.

    Args:
        model: The engine's model.
        config: Its configuration.
        options: Arguments of `load_model`.
        device: "cpu" or "gpu".
    """
    if device != "cpu":
        return "nothing is compiled ahead for a GPU"
    if isinstance(model, LoadedModel):
        return "the model is loaded already"
    if os.environ.get(VARIABLE, "0") not in ("", "0"):
        return f"{VARIABLE} is set"
    if options.get("weights", "packed") != "packed" or options.get("activations", "float32") != "float32":
        return "weights or activations of another type give other logits"
    if config.attention_backend != "auto" or config.kv_cache_dtype != "auto":
        return "the attention backend or the type of keys and values is chosen"
    if config.num_blocks == "auto" or config.gpu_memory_utilization is not None:
        return "the size of the pool depends on the memory that weights leave"
    if config.batch_invariant or config.async_scheduling or config.max_loras or config.shadow_metal is not None:
        return "batch_invariant, async_scheduling, adapters and shadow_metal need the runner that stays"
    if config.num_speculative_tokens:
        return "drafts are verified by the logits of one way"
    size = _size(model)
    if size is None or size > MAX_BYTES:
        return "in float32, the model would be too large"
    try:
        make_folder(cached("compiled"))
    except OSError:
        return "the cache folder cannot be written"
    if not os.access(cached("compiled"), os.W_OK):
        return "the cache folder cannot be written"
    return "the start before was over before its code was compiled" if _was_cut_off() else ""


def _was_cut_off() -> bool:
    """Whether the last compilation was ended early. It is told once, so that one start waits."""
    try:
        cached("compiled", CUT_OFF).unlink()
    except OSError:
        return False
    return True


def _size(model: str | Path) -> int | None:
    """Bytes of a model's files; None if it is not on this machine."""
    from workbench.models.bundled import bundled_path, is_bundled

    path = bundled_path() if is_bundled(model) else Path(model).expanduser()
    if is_bundled(model) and not path.exists():
        return 0  # it is small
    if path.is_dir():
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return path.stat().st_size if path.is_file() else None


class Compiling:
    """Another process that compiles, and the model that is loaded when it is done.

    Args:
        model: Name or path of the model.
        config: The configuration.
        options: Arguments of `load_model`.
    """

    def __init__(self, model: str | Path, config: EngineConfig, options: Mapping[str, Any]) -> None:
        import subprocess

        _announce()
        process, connection = start_connected("-m", compile_process.__name__, stderr=subprocess.DEVNULL)
        options = {name: _plain(value) for name, value in options.items()}
        asked = {"model": str(model), "options": options, "config": config.to_dict()}
        connection.send_bytes(json.dumps(asked).encode())
        self._progress = _Progress(process.pid)
        elsewhere.add(process.pid)
        work = threading.Thread(
            target=_follow, args=(process, connection, self._progress, model, options), name="workbench-compiling"
        )
        work.daemon = True
        work.start()
        self._end = weakref.finalize(self, _end, os.getpid(), process, self._progress, work)

    @property
    def loaded(self) -> LoadedModel | None:
        """The packed model, when it is there."""
        return self._progress.loaded

    @property
    def facts(self) -> dict[str, Any]:
        """Its state, the functions that were compiled, the seconds so far, and the reason of a failure."""
        progress = self._progress
        return {
            "state": progress.state,
            "functions": list(progress.functions),
            "seconds": round((progress.ended or time.monotonic()) - progress.started, 1),
            "reason": progress.reason,
        }

    def finish(self, state: str, reason: str = "") -> None:
        """Record how it ended."""
        self._progress.end(state, reason)
        if reason:
            log.warning("steps stay layer by layer, which is slower: %s", reason)

    def close(self) -> None:
        """End the process; functions that it has compiled are kept."""
        self._end()


@dataclass
class _Progress:
    """The progress of a process that compiles."""

    process: int
    state: str = "starting"
    reason: str = ""
    functions: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    loaded: LoadedModel | None = None
    stopped: bool = False

    def end(self, state: str, reason: str = "") -> None:
        """It has come to an end."""
        elsewhere.discard(self.process)
        if self.ended is None:
            self.state, self.reason, self.ended, self.loaded = state, reason, time.monotonic(), None


def _follow(
    process: subprocess.Popen[bytes],
    connection: Connection,
    progress: _Progress,
    model: str | Path,
    options: dict[str, Any],
) -> None:
    """Take the messages of the process until it ends, and load the model if it is done; on a thread."""
    last: dict[str, Any] = {}
    with connection, suppress(EOFError, OSError):
        while last.get("state") not in ("done", "failed"):
            last = json.loads(connection.recv_bytes())
            if last.get("kept"):
                progress.functions.append(last["function"])
            progress.state = last.get("state", f"compiling {last.get('function', '')}")
    code = process.wait()
    for folder in cached("compiled").glob("*/"):
        with suppress(OSError):
            remove_parts(folder)
    if progress.stopped:
        return
    if last.get("state") != "done":
        progress.end("failed", last.get("reason") or f"the process that compiles ended with status {code}")
        log.warning("steps stay layer by layer, which is slower: %s", progress.reason)
        return
    progress.state = "loading"
    try:
        with without_compiling():
            loaded = load_model(model, device="cpu", **options)
    except NotCompiled as missing:
        progress.end("failed", _not_kept(missing))
    except Exception as problem:
        progress.end("failed", f"the packed model could not be loaded: {problem}")
    else:
        progress.state, progress.loaded = "ready", loaded
        return
    log.warning("steps stay layer by layer, which is slower: %s", progress.reason)


def _not_kept(missing: NotCompiled) -> str:
    return (
        f"{missing} was compiled and not kept: is there room in {cache_folder()}? "
        "Engine(..., wait_for_compiled=True) compiles it in this process"
    )


def _end(owner: int, process: subprocess.Popen[bytes], progress: _Progress, work: threading.Thread) -> None:
    if os.getpid() != owner:  # a fork of the engine's process ends
        return
    progress.stopped = True
    if progress.ended is None and progress.state not in ("loading", "ready"):
        with suppress(OSError):
            cached("compiled", CUT_OFF).touch()
    progress.end("stopped")
    process.terminate()
    if threading.current_thread() is not work and sys.is_finalizing() is False:
        work.join(timeout=5)


def _plain(value: Any) -> Any:
    """A value for JSON: names of keys may be any collection, and paths are text."""
    return str(value) if isinstance(value, str | Path) else list(value)


@cache  # of three engines in a process the first one says it
def _announce() -> None:
    print(
        "compiling kernels for this CPU in another process, once; steps are slower until then: "
        'engine.describe()["compiling"] tells how far it is',
        file=sys.stderr,
        flush=True,
    )


def start(
    model: str | Path, config: EngineConfig, options: Mapping[str, Any]
) -> tuple[LoadedModel, ModelRunner, Compiling | None]:
    """A model and its runner, compiled if everything is kept, else layer by layer.

    Args:
        model: Name or path of the model.
        config: The configuration.
        options: Arguments of `load_model`.

    Returns:
        The model, its runner, and what compiles; None if nothing has to be compiled.
    """
    from workbench.engine.input_processor import resolve_config

    def served(backend: BackendName | None = None, **more: Any) -> tuple[LoadedModel, ModelRunner]:
        loaded = load_model(model, **{**options, **more})
        return loaded, ModelRunner(loaded, resolve_config(config, loaded), one_table=False, backend=backend)

    try:
        with without_compiling():
            return *served(), None
    except NotCompiled:
        pass
    compiling = Compiling(model, config, options)
    try:
        with without_compiling():
            loaded, runner = served(FALLBACK, weights="float32")
        if runner.mode == "kernel" and not runner.preflight.states:
            runner.wait_for_compiled()
            return loaded, runner, compiling
        runner.close()
    except BaseException:
        compiling.close()
        raise
    compiling.close()
    return *served(), None


def taken_over(first: ModelRunner, loaded: LoadedModel, packed: PackedBatch) -> ModelRunner | str:
    """The runner of compiled code over the pool of another one, if both agree about the step that ran last.

    The pool holds what the first one wrote if they do not.

    Args:
        first: Has run the step.
        loaded: The packed model.
        packed: The step.

    Returns:
        The runner, or why the first one has to stay.
    """
    expected = np.array(first.forward(packed)[0].values)
    pool, memory = first.kv_cache, first.kv_cache.arrays
    pool.replace_arrays([mx.zeros((0,))] * len(memory))  # MLX copies an array that has two owners
    second = None
    try:
        with without_compiling():
            second = ModelRunner(loaded, first.config, one_table=False, memory=memory)
            logits = np.array(second.forward(packed)[0].values)
        reason = _difference(logits, expected, first.preflight.bound)
    except NotCompiled as missing:
        reason = _not_kept(missing)
    except Exception as problem:
        reason = f"compiled code could not take over: {type(problem).__name__}: {problem}"
    if not reason and second is not None:
        return second
    if second is not None:
        second.close()
        del second
    pool.replace_arrays(memory)
    del memory
    first.forward(packed)
    return reason


def _difference(logits: np.ndarray, expected: np.ndarray, bound: float) -> str:
    """The difference between the logits of both ways; empty if rounding explains it."""
    errors = np.sqrt(np.square(logits - expected).mean(axis=1)) / expected.std()
    typical, worst = float(np.median(errors)), float(errors.max())
    if typical <= bound and worst <= WORST_ROW * bound:  # not true of a NaN
        return ""
    return (
        f"logits of compiled code differ from those of the model's layers by {typical:.1e} of their spread, and by "
        f"{worst:.1e} in one row (allowed: {bound:.0e} and {WORST_ROW * bound:.0e})"
    )
