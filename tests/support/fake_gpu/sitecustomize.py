"""Let MLX claim a GPU, in any process whose PYTHONPATH begins with this folder.

``mlx.core.default_device()`` is then the GPU until somebody chooses the CPU, as on a Mac, so models are loaded in half
precision with their weights quantised. Everything still computes on the CPU. The variable FAKE_GPU says what a Metal
kernel does there:

- ``broken`` (the default): it fails as one does that Apple's compiler rejects.
- ``emulated``: `workbench.msl` runs it, so that the Metal backend, its launches and its self-test run as on a Mac.
- ``wrong``: the same, but every kernel multiplies its results by 1.01, which only this GPU does.

    PYTHONPATH=tests/support/fake_gpu FAKE_GPU=emulated python -m pytest
"""

import importlib.abc
import importlib.util
import os
import sys

KERNELS = os.environ.get("FAKE_GPU", "broken")
NAME = f"Apple M3, {KERNELS}"


class _Finder(importlib.abc.MetaPathFinder):
    """Changes modules right after they have been loaded, by functions under their names."""

    def __init__(self, **changes):
        self._changes = {name.replace("__", "."): change for name, change in changes.items()}

    def find_spec(self, name, path, target=None):
        if (change := self._changes.pop(name, None)) is None:
            return None
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


def _pretend(mx):
    chosen = [mx.Device(mx.gpu)]
    device_info = mx.device_info
    mx.default_device = lambda: chosen[-1]
    mx.set_default_device = lambda device: chosen.append(device if isinstance(device, mx.Device) else mx.Device(device))
    mx.device_info = lambda device=None: (
        {**device_info(), "device_name": NAME} if (device or chosen[-1]) == mx.gpu else device_info()
    )
    mx.metal.is_available = lambda: True
    _multiply_in_float32(mx)
    if KERNELS != "broken":
        mx.fast.metal_kernel = _Emulated


def _multiply_in_float32(mx):
    """Leave products to BLAS: MLX's own of half precision or of quantised weights take minutes for a step on a CPU."""
    attention, wide = mx.fast.scaled_dot_product_attention, {}

    def quantized_matmul(x, w, scales, biases=None, transpose=True, group_size=None, bits=None, mode="affine", **kind):
        if id(w) not in wide:
            options = {"group_size": group_size, "bits": bits, "mode": mode}
            wide[id(w)] = mx.dequantize(w, scales, biases, **options).astype(mx.float32), w
        weights = wide[id(w)][0]
        return (x.astype(mx.float32) @ (weights.T if transpose else weights)).astype(x.dtype)

    def scaled_dot_product_attention(q, k, v, *, mask=None, sinks=None, **options):
        if mask is not None and not isinstance(mask, str) and mask.dtype != mx.bool_:
            mask = mask.astype(mx.float32)
        sinks = sinks if sinks is None else sinks.astype(mx.float32)
        q, k, v, dtype = *(array.astype(mx.float32) for array in (q, k, v)), q.dtype
        return attention(q, k, v, mask=mask, sinks=sinks, **options).astype(dtype)

    mx.quantized_matmul, mx.fast.scaled_dot_product_attention = quantized_matmul, scaled_dot_product_attention


class _Emulated:
    """A kernel of MLX that `workbench.msl` runs without its checks, which the kernels' own tests make."""

    def __init__(self, **kernel):
        self._kernel, self._made = kernel, None

    def __call__(self, **launch):
        if self._made is None:
            from workbench.kernels.msl import metal_kernel

            self._made = metal_kernel(**self._kernel)
        outputs = self._made(**launch, checks=False)
        return [output * 1.01 if KERNELS == "wrong" else output for output in outputs]


def _without_graph(backend):
    """The emulator computes at the call, where MLX only adds to a graph: no graph can be replayed."""
    if KERNELS != "broken":
        backend.MetalBackend.replayable_kernels = None


sys.meta_path.insert(0, _Finder(mlx__core=_pretend, workbench__kernels__attention__metal__backend=_without_graph))
