"""Find a compiler, compile kernels, keep the results.

Clang 17 or newer compiles Metal Shading Language as "C++ for OpenCL", a language with the same address spaces. It is
found as ``clang-NN`` or ``clang``, or inside PyPI's ``ziglang``, which contains a clang.

Environment variables:
    WORKBENCH_CLANG: The clang to use; "ziglang" selects the one in PyPI's ziglang.
    WORKBENCH_CACHE: The cache folder.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base.cache_folder import cached, keep, kept, make_folder
from workbench.kernels.msl.errors import MslCompilerMissing

FIRST_VERSION = 17  # the first clang that computes with bfloat
LATEST_NAMED_VERSION = 24

LINUX = ("linux", "x86_64"), ("linux", "aarch64")
MAC = "darwin", "arm64"
MAC_FLAGS = "-target", "arm64-apple-macosx14"

INCLUDE_FOLDER = Path(__file__).parent / "include"
RUNTIME_FOLDER = Path(__file__).parent / "runtime"

_LANGUAGE_FLAGS = (
    "-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-cl-single-precision-constant",
    "-Xclang", "-cl-ext=+cl_khr_fp16,-cl_khr_fp64,-__opencl_c_fp64,+__opencl_c_generic_address_space",
    "-isystem", str(INCLUDE_FOLDER),
)  # fmt: skip
_CODE_FLAGS = (
    "-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-gline-tables-only", "-gdwarf-4",
    # half and bfloat are rounded after every operation.
    "-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none",
    # Every fault must reach the checks, with its own source line.
    "-fno-delete-null-pointer-checks", "-fno-optimize-sibling-calls", "-fstack-clash-protection",
)  # fmt: skip
# "#pragma unroll" keeps arrays in a GPU's registers; here it would only make compilation several times slower.
_UNROLL_FLAGS = ("-mllvm", "-pragma-unroll-threshold=1")
# No warnings about Metal spellings that OpenCL lacks; errors for code that Apple's compiler rejects or that no kernel
# can mean.
_WARNING_FLAGS = (
    "-Wno-unknown-attributes", "-Wno-pass-failed", "-Wno-integer-overflow",
    "-Wimplicit-float-conversion", "-Wno-implicit-int-float-conversion", "-Werror=uninitialized",
    "-Werror=sometimes-uninitialized", "-Werror=return-type", "-ferror-limit=20",
    "-fno-caret-diagnostics", "-fno-color-diagnostics",
)  # fmt: skip
# Metal narrows a float to half by itself, to bfloat by a cast only. Clang has the type of another name behind "aka".
_NARROWED = re.compile(
    r"warning: (?=implicit conversion loses .* to (?:'[^']*' \(aka )?'[^']*\b(?:bfloat\w*|__bf16)\b)"
)
# The thread sanitizer's pass puts a call in front of every load and store; runtime/hooks.cpp defines the functions.
_CHECK_FLAGS = (
    "-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0",
    "-mllvm", "-tsan-instrument-read-before-write=1",
    "-fsanitize=array-bounds,return,unreachable",
    "-fsanitize=integer-divide-by-zero,signed-integer-overflow,float-cast-overflow",
    "-fsanitize=local-bounds", "-fsanitize-trap=local-bounds",
    "-ftrivial-auto-var-init=pattern", "-fno-vectorize", "-fno-slp-vectorize", "-mllvm", "-disable-vector-combine",
    # Equal statements in two branches stay separate, so that each keeps its line.
    "-mllvm", "-sink-common-insts=false", "-mllvm", "-hoist-common-insts=false",
)  # fmt: skip
_RUNTIME_FLAGS = (
    "-x", "c++", "-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
    "-fno-strict-aliasing",
)  # fmt: skip
# Metal's math modes: "fast" may assume that there are no NaNs and infinities, "relaxed" may not.
MATH_MODES = {
    "safe": (),
    "relaxed": ("-ffast-math", "-fhonor-nans", "-fhonor-infinities"),
    "fast": ("-ffast-math",),
}

HOW_TO_GET_ONE = (
    "running Metal kernels on the CPU needs clang 17 or newer: apt-get install clang-19, "
    "or pip install 'inference-workbench[msl]'"
)


class CompilerFailed(Exception):
    """A compiler ended with errors; holds its messages."""


@dataclass(frozen=True)
class Compiler:
    """A clang that can compile kernels.

    Attributes:
        kernel_command: Compiles C++ for OpenCL.
        runtime_command: Compiles C++.
        link_command: Links, as for C: the runtime needs nothing from the C++ library.
        libraries: Flags for the libraries to link with.
        version: Output of ``--version``; part of the cache's keys.
    """

    kernel_command: tuple[str, ...]
    runtime_command: tuple[str, ...]
    link_command: tuple[str, ...]
    libraries: tuple[str, ...]
    version: str


@functools.cache
def find_compiler() -> Compiler:
    """The compiler to use.

    Raises:
        MslCompilerMissing: There is none, or WORKBENCH_CLANG names an unsuitable one.
    """
    here = sys.platform, platform.machine()
    if here == MAC and "WORKBENCH_CLANG" not in os.environ:
        raise MslCompilerMissing(
            "kernels run on the CPU on Linux; for a Mac their runtime has only been compiled: to try it, "
            "pip install 'inference-workbench[msl]' and set WORKBENCH_CLANG=ziglang"
        )
    if here not in (*LINUX, MAC):
        raise MslCompilerMissing(f"kernels run on the CPU on Linux (x86-64, 64-bit Arm), not on {' '.join(here)}")
    if named := os.environ.get("WORKBENCH_CLANG"):
        if compiler := _zig() if named == "ziglang" else _clang(named):
            return compiler
        raise MslCompilerMissing(f"WORKBENCH_CLANG={named} is not clang {FIRST_VERSION} or newer")
    names = [f"clang-{version}" for version in range(LATEST_NAMED_VERSION, FIRST_VERSION - 1, -1)]
    for name in [*names, "clang"]:
        if (path := shutil.which(name)) and (compiler := _clang(path)):
            return compiler
    if compiler := _zig():
        return compiler
    raise MslCompilerMissing(HOW_TO_GET_ONE)


def why_unavailable() -> str:
    """Why Metal kernels cannot run on this CPU; empty if they can."""
    try:
        find_compiler()
    except MslCompilerMissing as problem:
        return str(problem)
    return ""


def _version_text(command: tuple[str, ...]) -> str:
    try:
        return subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _is_new_enough(version: str) -> bool:
    found = re.search(r"clang version (\d+)", version)
    return found is not None and int(found[1]) >= FIRST_VERSION


def _clang(path: str) -> Compiler | None:
    version = _version_text((path,))
    return Compiler((path,), (path,), (path,), ("-lm",), version) if _is_new_enough(version) else None


def _zig() -> Compiler | None:
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    zig = str(Path(spec.submodule_search_locations[0]) / "zig")
    version = _version_text((zig, "clang"))
    commands = (zig, "clang"), (zig, "c++"), (zig, "cc")
    return Compiler(*commands, zig_libraries(sys.platform), version) if _is_new_enough(version) else None


def zig_libraries(system: str) -> tuple[str, ...]:
    """Flags that keep zig from building a C library first, which takes half a minute.

    On Linux its functions are found when the kernel is loaded: Python has loaded the C library and libm.
    """
    return ("-nostdlib", "-lSystem") if system == "darwin" else ("-nostdlib",)


@functools.cache
def _machine_flags() -> tuple[str, ...]:
    """Flags for the instruction set to compile for, with half precision in hardware if the processor has it."""
    if sys.platform == "darwin":
        return MAC_FLAGS
    if platform.machine() != "x86_64":
        return ("-target", "aarch64-linux-gnu")
    try:
        flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    except (OSError, IndexError):
        flags = []
    has_avx2 = {"avx2", "f16c", "fma"} <= set(flags)
    return ("-target", "x86_64-linux-gnu", *(("-mavx2", "-mf16c", "-mfma") if has_avx2 else ()))


@functools.cache
def _shim_digest() -> str:
    """Digest of every file that affects how a text is compiled and whether it is accepted."""
    digest = hashlib.sha256()
    for path in [*sorted([*INCLUDE_FOLDER.iterdir(), *RUNTIME_FOLDER.iterdir()]), Path(__file__).with_name("lint.py")]:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compile_kernel(
    text: str, *, checks: bool, math_mode: str = "safe", examine: Callable[[str], None] = lambda syntax_tree: None
) -> Path:
    """Compile a translation unit to a shared library, or take it from the cache.

    The cache is keyed by the text, the shim, the flags and the compiler, so it needs no upkeep. Files appear in it
    whole or not at all, so several processes may compile at once.

    Args:
        text: The result of `rewrite.translation_unit`.
        checks: Whether to instrument every load and store.
        math_mode: "safe", "relaxed" or "fast".
        examine: Called with clang's syntax tree before a new text is compiled; may raise.

    Raises:
        CompilerFailed: Clang rejects the text.
        MslCompilerMissing: There is no compiler.
    """
    compiler = find_compiler()
    base = (*_LANGUAGE_FLAGS, *_machine_flags(), *_WARNING_FLAGS)
    flags = (*base, *_CODE_FLAGS, *_UNROLL_FLAGS, *MATH_MODES[math_mode], *(_CHECK_FLAGS if checks else ()))
    folder = cached("msl")
    library = folder / f"{_key(compiler, *flags, _NARROWED.pattern, text)}.so"
    if found := kept(library):
        return found
    make_folder(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix="compiling-") as scratch:
        unit, kernel_object, linked = (Path(scratch) / name for name in ("kernel.cl", "kernel.o", "kernel.so"))
        unit.write_text(text)
        command = [*compiler.kernel_command, *base, "-fsyntax-only", "-Xclang", "-ast-dump", str(unit)]
        done = subprocess.run(command, capture_output=True, text=True)
        if errors := _errors(done):
            raise CompilerFailed(errors)
        examine(done.stdout)
        _run([*compiler.kernel_command, *flags, "-c", str(unit), "-o", str(kernel_object)])
        objects = [str(path) for path in _runtime_objects(compiler, folder)]
        command = [*compiler.link_command, "-shared", "-g", "-o", str(linked), str(kernel_object), *objects]
        _run([*command, *compiler.libraries])
        return keep(linked, library)


def syntax_errors(text: str) -> str:
    """Clang's errors in a translation unit, templates instantiated; "" if it has none.

    Raises:
        MslCompilerMissing: There is no compiler.
    """
    compiler = find_compiler()
    command = [*compiler.kernel_command, *_LANGUAGE_FLAGS, *_machine_flags(), *_WARNING_FLAGS, "-fsyntax-only", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    return _errors(done)


def _errors(done: subprocess.CompletedProcess[str]) -> str:
    """Clang's messages if it or Metal rejects the text; "" if both accept it."""
    messages = _NARROWED.sub("error: ", done.stderr)
    return messages.strip() if done.returncode or messages != done.stderr else ""


def _key(compiler: Compiler, *parts: str) -> str:
    return hashlib.sha256("\0".join([compiler.version, _shim_digest(), *parts]).encode()).hexdigest()[:32]


def _runtime_objects(compiler: Compiler, folder: Path) -> list[Path]:
    """The runtime, compiled once per compiler."""
    # On a Mac the compiler's own choice: zig has another name for it than clang.
    flags = (*_RUNTIME_FLAGS, *(_machine_flags() if sys.platform == "linux" else ()))
    key = _key(compiler, *flags)
    sources = sorted(RUNTIME_FOLDER.glob("*.cpp"))
    return [_runtime_object(path, folder / f"runtime-{key}-{path.stem}.o", compiler, flags) for path in sources]


def _runtime_object(source: Path, target: Path, compiler: Compiler, flags: Sequence[str]) -> Path:
    if found := kept(target):
        return found
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="compiling-") as scratch:
        made = Path(scratch) / target.name
        _run([*compiler.runtime_command, *flags, "-c", str(source), "-o", str(made)])
        return keep(made, target)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CompilerFailed(done.stderr.strip())
