"""The device that MLX computes on: the environment variable WORKBENCH_DEVICE.

- ``auto`` (the default): the GPU if MLX has one, else the CPU.
- ``cpu``: the CPU. Weights are loaded as float32 there, so results agree to the last digits that a test may compare.
- ``gpu``: the GPU, or an error if there is none.

MLX has one default device per process, so this choice holds for everything in the process. It is made when a model is
loaded or an attention backend is chosen, not when workbench is imported.
"""

from __future__ import annotations

import os

DEVICE_VARIABLE = "WORKBENCH_DEVICE"
DEVICES = ("auto", "cpu", "gpu")


def requested_device() -> str:
    """The value of WORKBENCH_DEVICE, "auto" if it is not set.

    Raises:
        ValueError: It is not one of ``DEVICES``.
    """
    name = os.environ.get(DEVICE_VARIABLE, "").strip().lower() or "auto"
    if name not in DEVICES:
        raise ValueError(f"{DEVICE_VARIABLE} is {name!r}; it must be one of {', '.join(DEVICES)}")
    return name


def choose_device() -> None:
    """Make the requested device MLX's default; "auto" leaves MLX's own choice.

    Raises:
        ValueError: WORKBENCH_DEVICE is not a device, or asks for a GPU that MLX does not have here.
    """
    name = requested_device()
    if name == "auto":
        return
    import mlx.core as mx

    if name == "gpu" and not (mx.metal.is_available() or mx.cuda.is_available()):
        raise ValueError(f"{DEVICE_VARIABLE} is 'gpu', but MLX has no GPU on this machine; use 'cpu' or 'auto'")
    device = mx.cpu if name == "cpu" else mx.gpu
    if mx.default_device() != device:
        mx.set_default_device(device)


def runs_on_gpu() -> bool:
    """Whether MLX computes on a GPU, after `choose_device`."""
    choose_device()
    import mlx.core as mx

    return mx.default_device() == mx.gpu
