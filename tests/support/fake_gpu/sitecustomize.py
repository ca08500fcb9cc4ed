"""Let MLX claim a GPU, in any process whose PYTHONPATH begins with this folder.

``mlx.core.default_device()`` is then the GPU until somebody chooses the CPU, as on a Mac, so models are loaded in half
precision with their weights quantised. Everything still computes on the CPU, and a Metal kernel fails as one does that
Apple's compiler rejects.

    PYTHONPATH=tests/support/fake_gpu python -m pytest
"""

import importlib.abc
import importlib.util
import sys


class _Finder(importlib.abc.MetaPathFinder):
    """Changes ``mlx.core`` right after it has been loaded."""

    def find_spec(self, name, path, target=None):
        if name != "mlx.core":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _pretend(module)

        spec.loader.exec_module = exec_module
        return spec


def _pretend(mx):
    chosen = [mx.Device(mx.gpu)]
    mx.default_device = lambda: chosen[-1]
    mx.set_default_device = lambda device: chosen.append(device if isinstance(device, mx.Device) else mx.Device(device))
    mx.metal.is_available = lambda: True


sys.meta_path.insert(0, _Finder())
