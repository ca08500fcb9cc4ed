"""Machine code of compiled functions, kept on disk and loaded without a compiler.

numba compiles a function once per machine, unless its machine code came with the package. The machine code is kept,
and a later process lets LLVM place that in memory and takes the address. Neither numba's tables of types nor LLVM's
optimiser take part in this, and they are most of the memory and of the time that a first call through numba's own cache
needs.
"""

from __future__ import annotations

import builtins
import ctypes
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding
import numba
import numba.core.runtime._nrt_python as runtime_symbols
from numba import _dynfunc, _helperlib  # type: ignore[attr-defined]
from numba.core import types

from workbench.cpu.attention.processor import SHIPPED, config, cpu_features
from workbench.cpu.attention.simd import LANES
from workbench.ground.cache_folder import cache_folder, cached, make_folder

Signature = tuple[types.Type, ...]

_LOCK = RLock()
_DIGEST_BYTES = 32
_SHOWN_SECONDS = 1.0


class Code(NamedTuple):
    """A function in memory.

    Attributes:
        address: Its address, by numba's calling convention.
        call: Calls it from Python, without checks of the arguments' types; None if it was compiled without that.
    """

    address: int
    call: Any


def code_of(function: Callable[..., None], signature: Signature, for_python: bool) -> Code:
    """A compiled function.

    It is compiled if it is not kept, or was kept by other sources or packages or for another processor. If the folder
    cannot be written, each process compiles it.

    Args:
        function: The function, not compiled.
        signature: Types of its arguments.
        for_python: Whether Python calls it, too.

    Raises:
        TypeError: The function returns something.
    """
    with _LOCK:
        place = place_of(function, signature, for_python)
        kept = None if SHIPPED is None else _read(SHIPPED.joinpath(*place))
        if kept is None:
            path = cached("compiled", *place)
            kept = _read(path)
        if kept is None:
            if not path.parent.exists():
                _announce()
            start = time.perf_counter()
            kept = compiled(function, signature, for_python)
            write(path, kept)
            if time.perf_counter() - start > _SHOWN_SECONDS:
                print(f"compiled {function.__name__.lstrip('_')}", file=sys.stderr, flush=True)
        return _load(function, kept)


class _Kept(NamedTuple):
    """Machine code, and the names in it of a function, of its wrapper for Python, and of what the wrapper needs."""

    machine_code: bytes
    function: bytes
    wrapper: bytes = b""
    environment: bytes = b""


def compiled(function: Callable[..., None], signature: Signature, for_python: bool) -> _Kept:
    """Compile a function; see `code_of`."""
    options: Any = {"no_cpython_wrapper": not for_python, "no_cfunc_wrapper": True}
    dispatcher = numba.jit(nogil=True, error_model="numpy", **options)(function)
    dispatcher.compile(signature)
    compiled = dispatcher.overloads[signature]
    if compiled.signature.return_type != types.none:
        raise TypeError(f"{function.__qualname__} returns {compiled.signature.return_type}; it must return nothing")
    _, _, (machine_code, _) = compiled.library.serialize_using_object_code()
    names = compiled.fndesc
    kept = _Kept(machine_code, names.llvm_func_name.encode())
    if not for_python:
        return kept
    return kept._replace(wrapper=names.llvm_cpython_wrapper_name.encode(), environment=names.env_name.encode())


def _load(function: Callable[..., None], kept: _Kept) -> Code:
    """Place machine code in memory."""
    binding = llvmlite.binding
    machine = _target().create_target_machine()
    engine = binding.create_mcjit_compiler(
        binding.parse_assembly(""), machine, use_lmm=config.USE_LLVMLITE_MEMORY_MANAGER
    )
    engine.add_object_file(binding.ObjectFileRef.from_data(kept.machine_code))
    engine.finalize_object()
    _ENGINES.append(engine)
    address = engine.get_function_address(kept.function.decode())
    if not kept.wrapper:
        return Code(address, None)
    environment = _dynfunc.Environment({})
    place = engine.get_global_value_address(kept.environment.decode())
    ctypes.c_void_p.from_address(place).value = id(environment)
    wrapper = engine.get_function_address(kept.wrapper.decode())
    module = sys.modules[function.__module__]
    return Code(address, _dynfunc.make_function(module, function.__name__, "", wrapper, environment, (engine,)))


_ENGINES: list[Any] = []
"""Owners of the code: one for each function, because two functions may contain a third one by the same name."""


@cache
def _target() -> Any:
    """This processor's architecture; LLVM then knows by name what compiled code calls."""
    binding = llvmlite.binding
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    helpers: dict[str, int] = _helperlib.c_helpers | _dynfunc.c_helpers  # type: ignore[attr-defined]
    symbols = {f"numba_{name}": address for name, address in helpers.items()}
    of_runtime = runtime_symbols.c_helpers
    symbols |= {f"NRT_{name}".replace("NRT__", "_"): address for name, address in of_runtime.items()}
    symbols |= {f"PyExc_{name}": id(kind) for name, kind in vars(builtins).items() if isinstance(kind, type)}
    for name, address in (symbols | {"_Py_NoneStruct": id(None)}).items():
        binding.add_symbol(name, address)
    return binding.Target.from_triple(binding.get_process_triple())


# -- the files -----------------------------------------------------------------------------------------------------


def place_of(function: Callable[..., None], signature: Signature, for_python: bool) -> tuple[str, str]:
    """Names of a function's folder and file. The folder is that of its sources: this package's, and those beside it."""
    features = ",".join(sorted(cpu_features()))
    name = config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    versions = sys.implementation.cache_tag, numba.__version__, llvmlite.__version__
    key = repr((str(signature), for_python, name, features, LANES, llvmlite.binding.get_process_triple(), versions))
    sources = Path(function.__code__.co_filename).parent
    file_name = f"{function.__name__}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.code"
    return _source_digest(sources), file_name


def _read(path: Path) -> _Kept | None:
    """Content of a file of `_write`, None if there is none or it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, rest = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(rest).digest() != digest:
        return None
    *names, machine_code = rest.split(b"\0", 3)
    return _Kept(machine_code, *names)


def write(path: Path, kept: _Kept) -> None:
    """Keep machine code in a file, if it can be written."""
    rest = b"\0".join([kept.function, kept.wrapper, kept.environment, kept.machine_code])
    part = None
    try:
        make_folder(path.parent)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as stream:
            part = stream.name
            stream.write(hashlib.sha256(rest).digest() + rest)
        os.replace(part, path)  # another process may write the same file
    except OSError:
        if part is not None:
            Path(part).unlink(missing_ok=True)


@cache
def _announce() -> None:
    """Say once that the code is not compiled yet, because the first use takes a while."""
    print(
        f"compiling kernels for this CPU, once: a minute of processor time; they are kept in {cache_folder()}",
        file=sys.stderr,
        flush=True,
    )


@cache
def _source_digest(sources: Path) -> str:
    digest = hashlib.sha256()
    for folder in sorted({Path(__file__).parent, sources}):
        for source in sorted(folder.glob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
