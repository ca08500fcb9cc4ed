"""The pytest fixture ``metal_on_cpu``: kernels of ``mx.fast.metal_kernel`` run on this CPU, with every check.

pytest finds it by itself when Workbench is installed. It imports nothing until a test asks for the fixture.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from workbench.kernels.msl import KernelRun


class MetalOnCpu:
    """The kernels that a test launches.

    Attributes:
        runs: The recording of every launch so far, in order; its first ``threadgroups`` threadgroups.
        threadgroups: Number of threadgroups of each launch to record.
        watch: Variables of the kernels whose values are recorded.
        order: 0 runs threads in ascending order, 1 in descending order; a correct kernel gives the same result.
        checks: Whether launches are checked and recorded; without, a kernel with a known fault shows its results.
    """

    def __init__(self) -> None:
        self.runs: list[KernelRun] = []
        self.threadgroups = 1
        self.watch: Sequence[str] = ()
        self.order = 0
        self.checks = True
        self._replaced: dict[str, ModuleType | None] = {}

    def metal_kernel(self, *arguments: Any, **options: Any) -> Any:
        """Stands for ``mx.fast.metal_kernel``."""
        from workbench.kernels.msl import metal_kernel

        kernel = metal_kernel(*arguments, **options)

        def launch(*, verbose: bool = False, stream: object = None, **launched: Any) -> Any:
            if not self.checks:
                return kernel(**launched, order=self.order, checks=False)
            run = kernel.record(**launched, threadgroups=self._number(launched), watch=self.watch, order=self.order)
            self.runs.append(run)
            if run.error is not None:
                raise run.error
            return run.outputs

        return launch

    def _number(self, launched: dict[str, Any]) -> int:
        total = 1
        for threads, per_group in zip(launched["grid"], launched["threadgroup"]):
            total *= -(-threads // max(1, min(per_group, threads)))
        return min(self.threadgroups, total)

    def imported(self, name: str) -> ModuleType:
        """A module, imported again, so that the kernels that it makes on import run here; undone after the test."""
        self._replaced.setdefault(name, sys.modules.pop(name, None))
        return importlib.import_module(name)

    def restore(self) -> None:
        """Put the modules back that `imported` has replaced."""
        for name, module in self._replaced.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


@pytest.fixture
def metal_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetalOnCpu]:
    """MLX says that it has a Metal GPU, and `workbench.msl` runs every custom kernel; faults are errors.

    Functions are not compiled by ``mx.compile`` meanwhile, because a kernel on the CPU needs values.
    """
    import mlx.core as mx

    from workbench.kernels.msl import why_unavailable

    if reason := why_unavailable():
        pytest.skip(reason)
    kernels = MetalOnCpu()
    monkeypatch.setattr(mx.fast, "metal_kernel", kernels.metal_kernel)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    mx.disable_compile()
    try:
        yield kernels
    finally:
        mx.enable_compile()
        kernels.restore()
