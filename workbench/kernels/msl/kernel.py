"""`metal_kernel`: the replacement for `mlx.core.fast.metal_kernel` on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Unpack

import mlx.core as mx
import numpy as np

from workbench.kernels.msl import report
from workbench.kernels.msl.arrays import filled
from workbench.kernels.msl.asked_launch import AskedLaunch, LaunchArguments
from workbench.kernels.msl.compiler import INCLUDE_FOLDER, MATH_MODES, CompilerFailed, compile_kernel
from workbench.kernels.msl.diagnostics import Finding, compile_error, findings_of, texts_by_file
from workbench.kernels.msl.errors import MslError
from workbench.kernels.msl.launch import MAX_THREADS, Binding, Finished, ToRecord, position_of, run_library
from workbench.kernels.msl.lint import lint_text, lint_tree
from workbench.kernels.msl.recording import KernelRun, chosen_threadgroups, run_of
from workbench.kernels.msl.rewrite import translation_unit
from workbench.kernels.msl.signature import DTYPE_NAMES, MAX_BUFFERS, KernelText, TemplateArgument, write_kernel
from workbench.kernels.msl.statistics import LaunchStatistics, statistics_of
from workbench.kernels.msl.watching import with_watches

TIME_LIMIT_SECONDS = 600.0
MAX_RECORDED_BYTES = 256 << 20
MAX_RECORDED_THREADGROUPS = 65_535


@dataclass(frozen=True)
class _EndedLaunch:
    """A launch that has run, with its fault if it had one."""

    library: Path
    bindings: list[Binding]
    finished: Finished
    error: MslError | None


@dataclass(eq=False)
class MetalKernel:
    """A Metal kernel that runs on the CPU; the parameters are those of `mlx.core.fast.metal_kernel`.

    Args:
        name: Name of the kernel.
        input_names: Names of the inputs in ``source``.
        output_names: Names of the outputs.
        source: Body of the kernel in Metal Shading Language; the signature follows MLX's rules (`signature`).
        header: Text before the kernel function.
        ensure_row_contiguous: Whether inputs are first copied to row-major order.
        atomic_outputs: Whether outputs are ``atomic<T>*``.
        compile_options: {"math_mode": "safe" | "relaxed" | "fast"}; "safe" is the default.

    Attributes:
        last_statistics: `LaunchStatistics` of the last launch that asked for them, or None.

    Raises:
        ValueError: A name or an option is not allowed.
    """

    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str
    header: str = ""
    ensure_row_contiguous: bool = True
    atomic_outputs: bool = False
    compile_options: Mapping[str, str] | None = None
    last_statistics: LaunchStatistics | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not f"_{self.name}".isidentifier():
            raise ValueError(
                f"name is {self.name!r}: it becomes part of a function's name, so use letters, digits and _"
            )
        if not self.output_names:
            raise ValueError("output_names is empty: a kernel needs at least one output")
        self.input_names, self.output_names = tuple(self.input_names), tuple(self.output_names)
        names = (*self.input_names, *self.output_names)
        if bad := [n for n in names if not n.isidentifier()] or [n for n in names if names.count(n) > 1]:
            raise ValueError(
                f"{bad[0]!r} in input_names and output_names: each name must be an identifier and occur once"
            )
        options = dict(self.compile_options or {})
        self._math_mode = options.get("math_mode", "safe")
        self._libraries: dict[tuple[KernelText, bool], Path] = {}
        if options.keys() - {"math_mode"} or self._math_mode not in MATH_MODES:
            raise ValueError(
                f"compile_options is {options!r}: the only option is 'math_mode', one of {tuple(MATH_MODES)}"
            )

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array | bool | int | float],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, TemplateArgument]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: object = None,
        checks: bool = True,
        order: int = 0,
        statistics: bool = False,
        trace_buffers: Mapping[str, int] | None = None,
        time_limit: float = TIME_LIMIT_SECONDS,
    ) -> list[mx.array]:
        """Run the kernel; the parameters up to ``stream`` are those of a kernel of MLX.

        Args:
            inputs: One array or number per input name.
            output_shapes: One shape per output name.
            output_dtypes: One dtype per output name.
            grid: Number of threads (x, y, z), not of threadgroups.
            threadgroup: Threads per threadgroup (x, y, z), cut to the grid; their product is at most 1,024.
            template: Values of template parameters: bool, int or dtype.
            init_value: Initial value of the outputs; None leaves them uninitialised.
            verbose: Whether to print the generated text, as MLX does.
            stream: Accepted for compatibility with MLX, and ignored.
            checks: Whether to check every access. Without checks, faults go unseen and launches take about half the
                time.
            order: 0 runs threads in ascending order, 1 in descending order; a correct kernel gives the same result.
            statistics: Whether to fill `last_statistics`; requires ``checks``.
            trace_buffers: Bytes per row, by name, of the buffers whose rows read by each threadgroup are recorded;
                implies ``statistics``.
            time_limit: Seconds after which a launch with checks ends with an error; 0 for no limit.

        Returns:
            The outputs.

        Raises:
            ValueError: An argument is not allowed.
            MslError: The kernel has a fault.
            MslCompileError: The kernel does not compile.
            MslCompilerMissing: There is no compiler.
        """
        statistics = statistics or bool(trace_buffers)
        if statistics and not checks:
            raise ValueError(
                "statistics is True and checks is False: statistics are counted by the checks, so use both"
            )
        buffers = (*self.input_names, *self.output_names)
        if unknown := set(trace_buffers or {}) - set(buffers):
            raise ValueError(f"trace_buffers names {sorted(unknown)}: the buffers are {buffers}")
        for buffer, row_bytes in (trace_buffers or {}).items():
            if row_bytes < 1:
                raise ValueError(f"trace_buffers[{buffer!r}] is {row_bytes}: a row has at least 1 byte")

        asked = self._asked(
            inputs=inputs,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            grid=grid,
            threadgroup=threadgroup,
            template=template,
            init_value=init_value,
            order=order,
        )
        if verbose:
            print(f"Generated source code for `{self.name}`:\n```\n{asked.text.text}\n```")
        if 0 in grid:
            return [filled(shape, dtype, init_value) for shape, dtype in zip(output_shapes, output_dtypes)]
        ended = self._run(
            asked, checks=checks, statistics=statistics, trace_buffers=trace_buffers or {}, time_limit=time_limit
        )
        if ended.error:
            raise ended.error
        if statistics:
            self.last_statistics = statistics_of(ended.finished, ended.bindings)
        return asked.outputs(ended.bindings)

    def record(
        self,
        *,
        threadgroups: int | Sequence[int | Sequence[int]] = 1,
        watch: Sequence[str] = (),
        max_bytes: int = MAX_RECORDED_BYTES,
        order: int = 0,
        time_limit: float = TIME_LIMIT_SECONDS,
        **launch: Unpack[LaunchArguments],
    ) -> KernelRun:
        """Run the kernel with all checks, and record what some threadgroups do.

        A fault ends the launch as always, and is the recording's ``fault`` instead of an error.

        Args:
            threadgroups: The threadgroups to record: a number of them, the first ones to run, or a list of indices or
                positions (x, y, z).
            watch: Names of variables whose values are recorded after every assignment. A kernel may also contain
                ``WATCH(expression)``.
            max_bytes: Largest size of the recording in memory; later events are left out, and counted.
            order: 0 runs threads in ascending order, 1 in descending order.
            time_limit: Seconds after which the launch ends with a fault.
            **launch: The arguments of a launch: ``inputs``, ``output_shapes``, ``output_dtypes``, ``grid``,
                ``threadgroup``, ``template`` and ``init_value``.

        Returns:
            The recording, with the outputs if there was no fault.

        Raises:
            ValueError: An argument is not allowed.
            MslCompileError: The kernel does not compile.
            MslCompilerMissing: There is no compiler.

        Example:
            >>> import mlx.core as mx
            >>> from workbench import msl
            >>> kernel = msl.metal_kernel("twice", ["x"], ["y"], "uint i = thread_position_in_grid.x; y[i] = 2 * x[i];")
            >>> x = mx.arange(64)
            >>> kernel.record(inputs=[x], output_shapes=[x.shape], output_dtypes=[x.dtype], grid=(64, 1, 1),
            ...               threadgroup=(32, 1, 1))
            kernel twice: 96 events of 1 of 2 threadgroups
        """
        if 0 in launch["grid"]:
            raise ValueError(f"grid is {tuple(launch['grid'])}: a launch without threads has nothing to record")
        if max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}: a recording takes at least 1 byte")
        asked = self._asked(order=order, **launch)
        counts = [-(-size // per_group) for size, per_group in zip(asked.grid, asked.threadgroup)]
        chosen = chosen_threadgroups(threadgroups, counts, order)
        if (number := int(chosen.sum())) > MAX_RECORDED_THREADGROUPS:
            raise ValueError(f"threadgroups chooses {number}: at most {MAX_RECORDED_THREADGROUPS} are recorded")
        watched = replace(asked, text=with_watches(asked.text, watch))
        ended = self._run(watched, to_record=ToRecord(chosen, max_bytes), time_limit=time_limit)
        ran = np.flatnonzero(chosen)[:: -1 if order else 1]
        return run_of(
            ended.finished,
            ended.bindings,
            asked.recorded_arrays,
            ended.library,
            kernel=self.name,
            texts=texts_by_file(self._texts),
            grid=asked.grid,
            threadgroup=asked.threadgroup,
            threadgroups=tuple(position_of(int(index), ended.finished.launch) for index in ran),
            num_threadgroups=len(chosen),
            inputs=dict(zip(self.input_names, asked.inputs)),
            outputs=None if ended.error else asked.outputs(ended.bindings),
            error=ended.error,
        )

    @property
    def _texts(self) -> dict[str, str]:
        return {f"{self.name}.source": self.source, f"{self.name}.header": self.header}

    def _asked(self, *, order: int, **launch: Unpack[LaunchArguments]) -> AskedLaunch:
        """The launch that the arguments describe, once they have been checked."""
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in launch["inputs"]]
        output_dtypes, template = launch["output_dtypes"], list(launch.get("template") or [])
        grid, threadgroup, shapes = launch["grid"], launch["threadgroup"], launch["output_shapes"]
        self._validate(arrays, shapes, output_dtypes, grid, threadgroup, template, order)
        text = write_kernel(
            self.name,
            self.input_names,
            self.output_names,
            self.source,
            self.header,
            arrays,
            output_dtypes,
            template,
            self.atomic_outputs,
        )
        if len(text.parameters) > MAX_BUFFERS:
            raise ValueError(
                f"the kernel has {len(text.parameters)} buffers, shapes, strides and ndims included: Metal binds at "
                f"most {MAX_BUFFERS}"
            )
        cut = (min(threadgroup[0], grid[0]), min(threadgroup[1], grid[1]), min(threadgroup[2], grid[2]))
        whole = (grid[0], grid[1], grid[2])
        init_value = launch.get("init_value")
        rows = [tuple(shape) for shape in shapes]
        return AskedLaunch(text, arrays, rows, list(output_dtypes), whole, cut, init_value, order)

    def _run(
        self,
        asked: AskedLaunch,
        *,
        checks: bool = True,
        statistics: bool = False,
        trace_buffers: Mapping[str, int] = MappingProxyType({}),
        time_limit: float,
        to_record: ToRecord | None = None,
    ) -> _EndedLaunch:
        library = self._compile(asked.text, self._texts, checks)
        bindings = asked.bindings(trace_buffers, self.ensure_row_contiguous)
        finished = run_library(
            library,
            bindings,
            asked.grid,
            asked.threadgroup,
            checks=checks,
            order=asked.order,
            statistics=statistics,
            time_limit=time_limit,
            to_record=to_record,
        )
        error = report.fault_of(finished, bindings, library, self.name, texts_by_file(self._texts))
        return _EndedLaunch(library, bindings, finished, error)

    def _compile(self, text: KernelText, texts: Mapping[str, str], checks: bool) -> Path:
        """The library of a text; one that was compiled before is not looked for again, unless its file is gone."""
        library = self._libraries.get((text, checks))
        if library is None or not library.exists():
            library = self._libraries[text, checks] = self._compiled(text, texts, checks)
        return library

    def _compiled(self, text: KernelText, texts: Mapping[str, str], checks: bool) -> Path:
        def reject(findings: list[Finding]) -> None:
            if findings:
                raise compile_error(self.name, findings, texts_by_file(texts))

        def examine(syntax_tree: str) -> None:
            reject(lint_text(text, self.name) + lint_tree(syntax_tree))

        unit = translation_unit(text, self.name)
        try:
            return compile_kernel(unit, checks=checks, math_mode=self._math_mode, examine=examine)
        except CompilerFailed as failed:
            output = str(failed)
            reject(findings_of(output, str(INCLUDE_FOLDER)) or [Finding("", 0, output)])
            raise

    def _validate(
        self,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, TemplateArgument]],
        order: int,
    ) -> None:
        for argument, values, names in (
            ("inputs", inputs, self.input_names),
            ("output_shapes", output_shapes, self.output_names),
            ("output_dtypes", output_dtypes, self.output_names),
        ):
            if len(values) != len(names):
                raise ValueError(
                    f"{argument} has {len(values)} entries: it must have {len(names)}, one for each of {names}"
                )
        template_dtypes = [value for _, value in template if isinstance(value, mx.Dtype)]
        for dtype in [*(x.dtype for x in inputs), *output_dtypes, *template_dtypes]:
            if dtype not in DTYPE_NAMES:
                raise ValueError(f"dtype {dtype} is not supported on the CPU: use {', '.join(map(str, DTYPE_NAMES))}")
        for argument, size, least in (("grid", grid, 0), ("threadgroup", threadgroup, 1)):
            if len(size) != 3 or min(size) < least:
                raise ValueError(f"{argument} is {tuple(size)}: it must be three integers, each at least {least}")
        threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
        if threads > MAX_THREADS:
            raise ValueError(f"threadgroup is {tuple(threadgroup)}, {threads} threads: the maximum is {MAX_THREADS}")
        if order not in (0, 1):
            raise ValueError(f"order is {order!r}: it must be 0 (ascending) or 1 (descending)")


metal_kernel = MetalKernel
"""MLX's name for it."""
