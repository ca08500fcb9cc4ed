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
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

import llvmlite
import llvmlite.binding

from workbench.base.cache_folder import cache_folder, cached, make_folder
from workbench.kernels.cpu.attention.processor import LANES, NUMBA_VERSION, SHIPPED, config, cpu_features

if TYPE_CHECKING:
    from numba.core import types

    Signature = tuple[types.Type, ...]
else:
    Signature = tuple

_LOCK = RLock()
_DIGEST_BYTES, _PART = 32, ".part"
_SHOWN_SECONDS = 1.0
_PATIENCE_SECONDS = 120.0
_WITHOUT_COMPILING: ContextVar[bool] = ContextVar("without_compiling", default=False)

listeners: list[Callable[[str, bool], None]] = []
"""Functions that are called with the name of a function before it is compiled (False) and when it is kept (True)."""


class NotCompiled(BaseException):
    """A function is not kept, and may not be compiled here.

    It is not an Exception: checks of models take those for faults of the model.
    """


@contextmanager
def without_compiling() -> Iterator[None]:
    """Raise `NotCompiled` inside the block if a function would have to be compiled."""
    token = _WITHOUT_COMPILING.set(True)
    try:
        yield
    finally:
        _WITHOUT_COMPILING.reset(token)


class Code(NamedTuple):
    """A function in memory.

    Attributes:
        address: Its address, by numba's calling convention.
        call: Calls it from Python, without checks of the arguments' types; None if it was compiled without that.
    """

    address: int
    call: Any


class Wanted(NamedTuple):
    """A function to compile or to load.

    Attributes:
        module: Name of its module, which is imported if the function has to be compiled.
        name: Its name there.
        types: Text that stands for the types of its arguments.
        signature: Returns numba's types of its arguments.
        for_python: Whether Python calls it, too.
    """

    module: str
    name: str
    types: str
    signature: Callable[[], Signature]
    for_python: bool

    @property
    def folder(self) -> Path:
        """Folder of its sources."""
        module = sys.modules.get(self.module)
        if module is not None and module.__file__:
            return Path(module.__file__).parent
        spec = find_spec(self.module)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"no module named {self.module!r}", name=self.module)
        return Path(spec.origin).parent

    def function(self) -> Callable[..., None]:
        """The function, not compiled."""
        function = getattr(import_module(self.module), self.name)
        return getattr(function, "py_func", function)


elsewhere: set[int] = set()
"""Ids of processes that compile for this one."""


def compiling_elsewhere() -> AbstractContextManager[None]:
    """`without_compiling` as long as another process compiles for this one."""
    return without_compiling() if elsewhere else nullcontext()


def code_of(wanted: Wanted) -> Code:
    """A compiled function.

    It is compiled if it is not kept, or was kept by other sources or packages or for another processor. If the folder
    cannot be written, each process compiles it.

    Args:
        wanted: The function.

    Raises:
        TypeError: The function returns something.
        NotCompiled: It is not kept, inside `without_compiling`.
    """
    with _LOCK:
        place = place_of(wanted)
        kept = None if SHIPPED is None else _read(SHIPPED.joinpath(*place))
        if kept is None:
            path = cached("compiled", *place)
            kept = _read(path)
        if kept is None:
            if _WITHOUT_COMPILING.get():
                raise NotCompiled(wanted.name)
            if not path.parent.exists():
                _announce()
            with _alone(path):
                kept = _read(path) or _compiled_and_kept(wanted, path)
        return _load(wanted, kept)


def _compiled_and_kept(wanted: Wanted, path: Path) -> _Kept:
    start = time.perf_counter()
    for listener in listeners:
        listener(wanted.name, False)
    kept = compiled(wanted.function(), wanted.signature(), wanted.for_python)
    write(path, kept)
    for listener in listeners:
        listener(wanted.name, True)
    if time.perf_counter() - start > _SHOWN_SECONDS:
        print(f"compiled {wanted.name.lstrip('_')}", file=sys.stderr, flush=True)
    return kept


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait while another process compiles the function of a file: what it keeps need not be compiled again.

    The lock is a byte of a file that all functions share, and ends with its process. A process that is stopped keeps
    others waiting no longer than `_PATIENCE_SECONDS`. Some systems and folders have no locks: nothing waits there.
    """
    with ExitStack() as stack:
        with suppress(ImportError, OSError):
            import fcntl

            make_folder(cached("compiled"))
            number = os.open(cached("compiled", "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, number)
            byte = int.from_bytes(hashlib.sha256(str(path).encode()).digest()[:4])
            until = time.monotonic() + _PATIENCE_SECONDS
            while time.monotonic() < until:
                with suppress(BlockingIOError, PermissionError):
                    fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
                    break
                time.sleep(0.05)
        yield


class _Kept(NamedTuple):
    """Machine code, and the names in it of a function, of its wrapper for Python, and of what the wrapper needs."""

    machine_code: bytes
    function: bytes
    wrapper: bytes = b""
    environment: bytes = b""


def compiled(function: Callable[..., None], signature: Signature, for_python: bool) -> _Kept:
    """Compile a function.

    Args:
        function: The function, not compiled.
        signature: Types of its arguments.
        for_python: Whether Python calls it, too.

    Raises:
        TypeError: It returns something.
    """
    import numba
    from numba.core import types

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


def _load(wanted: Wanted, kept: _Kept) -> Code:
    """Place machine code in memory."""
    binding = llvmlite.binding
    machine = _target().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine, use_lmm=config.own_memory)
    engine.add_object_file(binding.ObjectFileRef.from_data(kept.machine_code))
    engine.finalize_object()
    _ENGINES.append(engine)
    address = engine.get_function_address(kept.function.decode())
    if not kept.wrapper:
        return Code(address, None)
    functions = _extension("numba._dynfunc")
    environment = functions.Environment({})
    place = engine.get_global_value_address(kept.environment.decode())
    ctypes.c_void_p.from_address(place).value = id(environment)
    wrapper = engine.get_function_address(kept.wrapper.decode())
    owner = sys.modules[__name__]
    return Code(address, functions.make_function(owner, wanted.name, "", wrapper, environment, (engine,)))


_ENGINES: list[Any] = []
"""Owners of the code: one for each function, because two functions may contain a third one by the same name."""


@cache
def _target() -> Any:
    """This processor's architecture; LLVM then knows by name what compiled code calls."""
    binding = llvmlite.binding
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    helpers = _extension("numba._helperlib").c_helpers | _extension("numba._dynfunc").c_helpers
    symbols = {f"numba_{name}": address for name, address in helpers.items()}
    of_runtime = _extension("numba.core.runtime._nrt_python").c_helpers
    symbols |= {f"NRT_{name}".replace("NRT__", "_"): address for name, address in of_runtime.items()}
    symbols |= {f"PyExc_{name}": id(kind) for name, kind in vars(builtins).items() if isinstance(kind, type)}
    for name, address in (symbols | {"_Py_NoneStruct": id(None)}).items():
        binding.add_symbol(name, address)
    return binding.Target.from_triple(binding.get_process_triple())


def _extension(name: str) -> Any:
    """A module of numba's written in C, without the packages around it, whose import takes most of a second.

    A later import of numba finds the module and uses it, too.
    """
    if name in sys.modules:
        return sys.modules[name]
    package, _, rest = name.partition(".")
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for suffix in EXTENSION_SUFFIXES:
            path = Path(folder, *rest.split(".")).with_suffix(suffix)
            if path.exists():
                loader = ExtensionFileLoader(name, str(path))
                sys.modules[name] = module = module_from_spec(ModuleSpec(name, loader, origin=str(path)))
                loader.exec_module(module)
                return module
    return import_module(name)


# -- the files -----------------------------------------------------------------------------------------------------


def place_of(wanted: Wanted) -> tuple[str, str]:
    """Names of a function's folder and file. The folder is that of its sources: this package's, and those beside it."""
    features = ",".join(sorted(cpu_features()))
    name = config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    versions = sys.implementation.cache_tag, NUMBA_VERSION, llvmlite.__version__
    key = repr(
        (wanted.types, wanted.for_python, name, features, LANES, llvmlite.binding.get_process_triple(), versions)
    )
    file_name = f"{wanted.name}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.code"
    return _source_digest(wanted.folder), file_name


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
    part = path.with_name(f"{path.name}.{os.getpid()}{_PART}")
    try:
        make_folder(path.parent)
        remove_parts(path.parent)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(hashlib.sha256(rest).digest() + rest)
        os.replace(part, path)  # another process may write the same file
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def remove_parts(folder: Path) -> None:
    """Remove files that processes had not finished when they were ended."""
    for part in folder.glob(f"*{_PART}"):
        if not _is_running(int(part.name.split(".")[-2])):
            part.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        pass
    return True


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
