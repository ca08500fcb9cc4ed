"""Findings of the checks of a model, kept in the cache folder from one start to the next.

A model is checked when it is loaded: products with packed weights, the preflight, the compiled step. The same files,
on the same processor, with the same sources and packages, pass the same checks. So an entry of the cache folder is
named after all of these, and a start that finds its entry skips the checks. A new model, kernel, package or processor
has another entry. A damaged entry is ignored.

``WORKBENCH_PREFLIGHT=always`` checks every model that is loaded, and keeps findings in memory alone, for more engines
over the same loaded model.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from workbench.base.cache_folder import cached, make_folder
from workbench.base.installed import installed_version
from workbench.base.outside_files import open_bytes, read_json

VARIABLE = "WORKBENCH_PREFLIGHT"
"""Environment variable: "remembered" (default) or "always"."""

MAX_ENTRIES = 64
"""Entries that are kept; the oldest ones are deleted."""

_PACKAGES = ("inference-workbench", "mlx", "mlx-lm", "numpy", "numba", "llvmlite", "gguf", "scipy-openblas32")
_SOURCES = ("models", "kernels/attention", "kernels/cpu", "base")
_SAMPLES, _SAMPLE_BYTES = 64, 4096


class Remembered:
    """Findings about a loaded model, and those of earlier starts about the same files.

    Args:
        key: All that the findings depend on, as JSON values; None to keep them in memory alone.

    Example:
        >>> findings = Remembered()
        >>> findings.put("products", True)
        >>> findings.get("products"), Remembered().get("products")
        (True, None)
    """

    def __init__(self, key: dict[str, Any] | None = None) -> None:
        self._key = key
        self._path = cached("preflight", f"{_digest(key)[:32]}.json") if key is not None else None
        self._found = self._read()

    def get(self, name: str) -> Any:
        """A finding as JSON values, None if there is none."""
        return self._found.get(name)

    def put(self, name: str, value: Any) -> None:
        """Keep a finding; a folder that cannot be written keeps none.

        Args:
            name: Its name.
            value: JSON values.
        """
        self._found[name] = value
        if self._path is None:
            return
        content = {"key": self._key, "found": self._found}
        try:
            make_folder(self._path.parent)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, suffix=".part", delete=False) as stream:
                json.dump(content | {"digest": _digest(content)}, stream)
            os.replace(stream.name, self._path)
            for old in sorted(entries(), key=lambda path: path.stat().st_mtime)[:-MAX_ENTRIES]:
                old.unlink()
        except OSError:
            pass

    def _read(self) -> dict[str, Any]:
        """The findings of the entry; none if there is no entry, or it is damaged or of another key."""
        if self._path is None:
            return {}
        try:
            content = read_json(self._path)
            digest = content.pop("digest")
            return content["found"] if digest == _digest(content) and content["key"] == self._key else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}


class _Nothing(Remembered):
    def put(self, name: str, value: Any) -> None:
        """Keep nothing."""


NOTHING = _Nothing()
"""Remembers nothing."""


def remembered(files: Iterable[Path], **settings: str) -> Remembered:
    """Findings of earlier starts about the model of some files.

    Args:
        files: All files of the model.
        **settings: The way it is loaded.

    Raises:
        ValueError: ``WORKBENCH_PREFLIGHT`` has an unknown value.
    """
    if not is_on():
        return Remembered()
    key = {
        "files": [_identity(path) for path in files],
        "settings": settings,
        "sources": sources_digest(Path(__file__).parents[1]),
        "versions": {"python": platform.python_version(), **_versions()},
        "processor": _processor(),
    }
    return Remembered(key)


def is_on() -> bool:
    """Whether findings are remembered.

    Raises:
        ValueError: ``WORKBENCH_PREFLIGHT`` has an unknown value.
    """
    value = os.environ.get(VARIABLE, "remembered")
    if value not in ("remembered", "always"):
        raise ValueError(f'{VARIABLE} is {value!r}; it must be "remembered" or "always"')
    return value == "remembered"


def entries_folder() -> Path:
    """The folder of the entries; it may not exist yet."""
    return cached("preflight")


def entries() -> list[Path]:
    """The entries that there are."""
    return list(entries_folder().glob("*.json"))


def sources_digest(package: Path) -> str:
    """Digest of all sources that compute with a model, or check it.

    Args:
        package: Folder of the package.
    """
    digest = hashlib.sha256()
    for part in _SOURCES:
        if not (package / part).is_dir():
            raise FileNotFoundError(f"{package / part} is missing: a check would be remembered for any source")
        for file in sorted((package / part).rglob("*")):
            if file.is_file() and file.suffix != ".pyc":
                digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _identity(path: Path) -> list[Any]:
    """Name, size, time of the last change, and a digest of samples of a file."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with open_bytes(path) as stream:
        for place in _sample_places(size):
            stream.seek(place)
            digest.update(stream.read(_SAMPLE_BYTES))
    return [path.name, size, path.stat().st_mtime_ns, digest.hexdigest()]


def _sample_places(size: int) -> Sequence[int]:
    """Bytes at which the samples of a file begin; the first and the last ones are at its ends."""
    last = max(0, size - _SAMPLE_BYTES)
    return sorted({last * index // (_SAMPLES - 1) for index in range(_SAMPLES)})


@cache
def _versions() -> dict[str, str]:
    versions = {package: installed_version(package) for package in _PACKAGES}
    return {package: version for package, version in versions.items() if version is not None}


def _processor() -> dict[str, Any]:
    """The processor and the instructions that code is compiled for, and MLX's device."""
    import llvmlite.binding

    from workbench.kernels.cpu.attention.processor import config

    features = sorted(name for name, present in llvmlite.binding.get_host_cpu_features().items() if present)
    return {
        "machine": platform.machine(),
        "name": llvmlite.binding.get_host_cpu_name(),
        "features": features,
        "compiled for": [config.CPU_NAME, config.CPU_FEATURES],
        "device": [str(mx.default_device()), str(mx.device_info().get("device_name", ""))],
    }


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
