"""The device that MLX computes on: the argument ``device`` of an engine or a model, or the variable WORKBENCH_DEVICE.

- ``auto`` (the default): what the variable says, else the GPU if MLX has one, else the CPU.
- ``cpu``: the CPU. Weights are loaded as float32 there, so results agree to the last digits that a test may compare.
- ``gpu``: the GPU, or an error if there is none.

MLX has one default device per process, so all engines of a process compute on one device at a time. An engine holds
its device until it is closed (`hold_device`); an engine for the other one is refused meanwhile, and "auto" takes the
device that is held. The choice is made when a model is loaded or an attention backend is chosen, never by an import.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from workbench.base.field_checks import suggestion

Device = Literal["auto", "cpu", "gpu"]

DEVICE_VARIABLE = "WORKBENCH_DEVICE"
DEVICES = ("auto", "cpu", "gpu")

_held: dict[int, tuple[str, str]] = {}
"""Device and name of each holder, by a number."""
_lock = threading.RLock()
_replaced: list[Any] = []
"""MLX's own choice, and what took its place; empty until an argument or the variable asks for another."""


def requested_device() -> str:
    """The value of WORKBENCH_DEVICE, "auto" if it is not set.

    Raises:
        ValueError: See `check_device`.
    """
    device = os.environ.get(DEVICE_VARIABLE, "").strip().lower() or "auto"
    check_device(DEVICE_VARIABLE, device)
    return device


def check_device(what: str, device: str) -> None:
    """Check a device that was asked for.

    Args:
        what: Name of the argument or variable.
        device: Its value.

    Raises:
        ValueError: It is not one of ``DEVICES``, or MLX has no such device here.
    """
    if device not in DEVICES:
        raise ValueError(f"{what} is {device!r}; it must be one of {', '.join(DEVICES)}{suggestion(device, DEVICES)}")
    if device == "gpu" and not has_gpu():
        raise ValueError(f"{what} is 'gpu', but MLX has no GPU on this machine; use 'cpu' or 'auto'")


def choose_device(device: str = "auto") -> None:
    """Make a device MLX's default.

    Args:
        device: One of ``DEVICES``. "auto" takes the device that an engine holds, else the one that WORKBENCH_DEVICE
            names, else MLX's own choice.

    Raises:
        ValueError: The argument or the variable is not a device, MLX has no GPU here, or an engine that is not closed
            computes on the other device.
    """
    check_device("device", device)
    with _lock:
        held = next(iter(list(_held.values())), None)
        if held is not None and device not in ("auto", held[0]):
            raise ValueError(
                f"device is {device!r}, but engine {held[1]!r} computes on the {held[0].upper()}, and MLX has one "
                f"device per process: close() that engine first, or use device={held[0]!r}"
            )
        if device == "auto":
            device = held[0] if held is not None else requested_device()
        import mlx.core as mx

        now = mx.default_device()
        if device == "auto":
            if _replaced and now == _replaced[1]:
                mx.set_default_device(_replaced[0])
                _replaced.clear()
            return
        wanted = mx.Device(mx.cpu if device == "cpu" else mx.gpu)
        if now != wanted:
            _replaced[:] = [_replaced[0] if _replaced else now, wanted]
            mx.set_default_device(wanted)


def hold_device(holder: object, name: str, device: str = "auto") -> Callable[[], object]:
    """Choose a device and keep it for a holder, until it lets go or is garbage collected.

    Args:
        holder: An engine.
        name: Its name, for the message that refuses another device.
        device: See `choose_device`, whose errors this raises.

    Returns:
        The function that lets go of it.
    """
    with _lock:
        choose_device(device)
        key = max(_held, default=0) + 1
        _held[key] = (default_device(), name)
    return weakref.finalize(holder, _held.pop, key, None)


@contextmanager
def holding_device(name: str, device: str = "auto") -> Iterator[None]:
    """Keep a device while something is computed, see `hold_device`."""

    class Holder:
        """Lives as long as the work."""

    holder = Holder()
    let_go = hold_device(holder, name, device)
    try:
        yield
    finally:
        let_go()


def has_gpu() -> bool:
    """Whether MLX has a GPU on this machine."""
    import mlx.core as mx

    return bool(mx.metal.is_available() or mx.cuda.is_available())


def default_device() -> Literal["cpu", "gpu"]:
    """The device that MLX computes on now."""
    import mlx.core as mx

    return "gpu" if mx.default_device() == mx.gpu else "cpu"


def runs_on_gpu() -> bool:
    """Whether MLX computes on a GPU, after `choose_device`."""
    choose_device()
    return default_device() == "gpu"


def gpu_name() -> str:
    """Name of the GPU, such as "Apple M3"."""
    import mlx.core as mx

    return str(mx.device_info(mx.gpu).get("device_name", "this GPU"))


def why_cpu() -> str:
    """Why MLX computes on the CPU."""
    if not has_gpu():
        return "this machine has no GPU"
    return f"{DEVICE_VARIABLE} is cpu" if requested_device() == "cpu" else "it was asked for, and the GPU is not used"
