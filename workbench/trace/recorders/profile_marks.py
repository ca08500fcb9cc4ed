"""Marks steps in the profiles that torch's profiler or Nsight Systems make of the engine's process.

Torch is never imported: an engine that uses it has imported it before its scheduler exists.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from workbench.trace.step_marks import MARK_NAME

_NVTX_SWITCHES = ("VLLM_NVTX_SCOPES_FOR_PROFILING", "NSYS_PROFILING_SESSION_ID")
"""Environment variables of a process with NVTX: vLLM's own switch, and what ``nsys profile`` sets."""


class ProfileMarks:
    """Marks of steps, in torch's profiler while it runs and as NVTX where that is on.

    Args:
        environment: Environment variables.

    Attributes:
        switch: Its ``_is_profiler_enabled`` says whether there is something to mark: the module of torch's profiler,
            whose attribute costs a step less than a call.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        profiler: Any = sys.modules.get("torch.autograd.profiler")
        self.switch: Any = SimpleNamespace(_is_profiler_enabled=False)
        if not isinstance(getattr(profiler, "_is_profiler_enabled", None), bool):
            return
        self._profiler = profiler
        self._nvtx = _nvtx() if any(environment.get(name, "0") not in ("", "0") for name in _NVTX_SWITCHES) else None
        self.switch = profiler if self._nvtx is None else SimpleNamespace(_is_profiler_enabled=True)

    def mark(self, step: int, moment: str) -> None:
        """Mark a moment of a step, now."""
        name = MARK_NAME.format(step=step, moment=moment)
        if self._profiler._is_profiler_enabled:  # also under emit_nvtx, which makes NVTX ranges of torch's
            with self._profiler.record_function(name):
                pass
        if self._nvtx is not None:
            self._nvtx(name)


def _nvtx() -> Callable[[str], Any] | None:
    """``torch.cuda.nvtx.mark``; None if this torch is built without NVTX."""
    mark: Callable[[str], Any] | None = getattr(sys.modules.get("torch.cuda.nvtx"), "mark", None)
    try:
        if mark is not None:
            mark("workbench records")
    except RuntimeError:  # NVTX functions not installed
        return None
    return mark
