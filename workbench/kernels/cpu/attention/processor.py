"""The processor that numba compiles for: this one, or a level for which machine code came with the package.

Compiling the kernels takes almost a minute of processor time, once per machine. A wheel may hold their machine code for
common levels of instruction sets (``scripts/build_machine_code.py`` makes it). On a processor of such a level numba
compiles for the level, so that everything which depends on instruction sets agrees with the code that came along.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llvmlite.binding

from workbench.base.installed import installed_version

NUMBA_VERSION = installed_version("numba")


def _settings() -> Any:
    """Numba's settings for the processor; numba itself is imported only if they are in its file."""
    if "numba.core.config" in sys.modules or Path(".numba_config.yaml").exists():
        import numba

        settings: Any = numba.config  # numba sets its attributes at import, so a type checker does not know them
        own_memory = settings.USE_LLVMLITE_MEMORY_MANAGER
        return SimpleNamespace(CPU_NAME=settings.CPU_NAME, CPU_FEATURES=settings.CPU_FEATURES, own_memory=own_memory)
    name = os.environ.get("NUMBA_CPU_NAME")
    features = os.environ.get("NUMBA_CPU_FEATURES", "" if str(name).lower() == "generic" else None)
    own_memory = os.environ.get("NUMBA_USE_LLVMLITE_MEMORY_MANAGER")
    return SimpleNamespace(CPU_NAME=name, CPU_FEATURES=features, own_memory=own_memory and bool(int(own_memory)))


config = _settings()
"""The name and the features of the processor that numba compiles for, None for this one's."""

MACHINE_CODE = Path(__file__).parents[1] / "machine_code"
"""Folder of the machine code that came with the package; it need not exist."""

_V3 = "+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe"
LEVELS = {
    "x86-64-v3": _V3,
    "x86-64-v4": _V3 + ",+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl,+avx512vnni",
}
"""LLVM's name of each level, and its features."""

_ASKED_FOR = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vnni", "avxvnni"}


def cpu_features() -> set[str]:
    """LLVM's names of the instruction sets that numba compiles for."""
    if config.CPU_FEATURES is None:
        return {name for name, present in llvmlite.binding.get_host_cpu_features().items() if present}
    return _names(config.CPU_FEATURES)


def _names(features: str) -> set[str]:
    return {name[1:] for name in features.split(",") if name.startswith("+")}


def level_of(features: set[str]) -> str | None:
    """The level of a processor; None if our code would use more of it, or it has less.

    Args:
        features: LLVM's names of its instruction sets.

    Example:
        >>> level_of({"sse2"}) is None
        True
    """
    for level, needed in LEVELS.items():
        used = features & _ASKED_FOR - ({"avxvnni"} if "avx512f" in features else set())
        if _names(needed) <= features and used == _names(needed) & _ASKED_FOR:
            return level
    return None


def code_folder(level: str) -> Path:
    """Folder of the machine code of a level, for this Python and numba."""
    return MACHINE_CODE / f"{level}-{sys.implementation.cache_tag}-numba-{NUMBA_VERSION}"


def _choose() -> Path | None:
    """Let numba compile for this processor's level if there is machine code for it; the code's folder."""
    if config.CPU_NAME is not None:  # the user's choice, or a level's
        return code_folder(config.CPU_NAME) if LEVELS.get(config.CPU_NAME) == config.CPU_FEATURES else None
    level = level_of(cpu_features()) if MACHINE_CODE.is_dir() and config.CPU_FEATURES is None else None
    if level is None or not code_folder(level).is_dir():
        return None
    config.CPU_NAME, config.CPU_FEATURES = level, LEVELS[level]
    return code_folder(level)


SHIPPED = _choose()
"""Folder of the machine code that this process may use, None if there is none."""


def _vector_width() -> int:
    """Number of float32 elements in a vector register of the processor that numba compiles for."""
    features = cpu_features()
    return 16 if "avx512f" in features else 8 if "avx2" in features else 4


LANES = _vector_width()
"""Number of float32 elements in a vector register: 16 with AVX-512, 8 with AVX2, else 4."""


def instruction_set() -> str:
    """The instructions that multiply bytes: "VNNI", "AVX-512", "AVX2", or "" for none that is known."""
    features = cpu_features()
    if LANES == 16:
        return "VNNI" if "avx512vnni" in features else "AVX-512" if "avx512bw" in features else ""
    if LANES == 8:
        return "VNNI" if "avxvnni" in features else "AVX2"
    return ""
