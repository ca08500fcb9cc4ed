"""The arguments of a launch, and the buffers that they become."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import mlx.core as mx
import numpy as np

from workbench.kernels.msl.arrays import bits_of, filled, memory_of, to_array, view_of
from workbench.kernels.msl.launch import Binding
from workbench.kernels.msl.recorded import RecordedArray
from workbench.kernels.msl.signature import KernelText, TemplateArgument


class LaunchArguments(TypedDict):
    """The arguments of a launch that a kernel of MLX has, see `MetalKernel.__call__`."""

    inputs: Sequence[mx.array | bool | int | float]
    output_shapes: Sequence[Sequence[int]]
    output_dtypes: Sequence[mx.Dtype]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    template: NotRequired[Sequence[tuple[str, TemplateArgument]] | None]
    init_value: NotRequired[float | None]


@dataclass(frozen=True)
class AskedLaunch:
    """A launch whose arguments have been checked."""

    text: KernelText
    inputs: Sequence[mx.array]
    output_shapes: Sequence[tuple[int, ...]]
    output_dtypes: Sequence[mx.Dtype]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    init_value: float | None
    order: int

    def bindings(self, trace_buffers: Mapping[str, int], row_contiguous: bool) -> list[Binding]:
        """The kernel's buffers, with the contents of the inputs."""
        views = [view_of(x, row_contiguous) for x in self.inputs]
        bindings = []
        for parameter in self.text.parameters:
            i = parameter.array
            traced = trace_buffers.get(parameter.name, 0)
            if parameter.role == "output":
                start = filled(self.output_shapes[i], self.output_dtypes[i], self.init_value)
                data = np.array(bits_of(start)).reshape(-1).view(np.uint8)
                bindings.append(
                    Binding(
                        parameter.name,
                        data,
                        self.output_dtypes[i].size,
                        is_output=True,
                        is_initialised=self.init_value is not None,
                        traced_row_bytes=traced,
                    )
                )
            elif parameter.role == "input":
                data, offset = memory_of(views[i])
                size = self.inputs[i].dtype.size
                bindings.append(Binding(parameter.name, data, size, argument_offset=offset, traced_row_bytes=traced))
            else:
                metadata: dict[str, np.ndarray] = {
                    "shape": np.array(views[i].shape, np.int32),
                    "strides": np.array([s // views[i].itemsize for s in views[i].strides], np.int64),
                    "ndim": np.array([views[i].ndim], np.int32),
                }
                values = metadata[parameter.role]
                bindings.append(Binding(parameter.name, values.view(np.uint8), values.itemsize))
        return bindings

    def outputs(self, bindings: Sequence[Binding]) -> list[mx.array]:
        """The outputs that a launch with these buffers has written."""
        written = [binding.data for binding in bindings if binding.is_output]
        return [to_array(*output) for output in zip(written, self.output_shapes, self.output_dtypes)]

    @property
    def recorded_arrays(self) -> list[RecordedArray]:
        """The buffers, as a recording describes them."""
        arrays = []
        for parameter in self.text.parameters:
            i = parameter.array
            if parameter.role in ("input", "output"):
                shape = self.inputs[i].shape if parameter.role == "input" else self.output_shapes[i]
                dtype = self.inputs[i].dtype if parameter.role == "input" else self.output_dtypes[i]
                name, size = str(dtype).removeprefix("mlx.core.").rstrip("_"), dtype.size
            else:
                shape = () if parameter.role == "ndim" else (self.inputs[i].ndim,)
                name, size = ("int64", 8) if parameter.role == "strides" else ("int32", 4)
            role = parameter.role if parameter.role in ("input", "output") else "shape"
            arrays.append(RecordedArray(parameter.name, role, name, tuple(shape), size * math.prod(shape)))
        return arrays
