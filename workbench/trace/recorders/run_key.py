"""The random key of a run, from which block hashes are made. It is never stored with a recording.

The ranks of a run share one key, so that their hashes can be compared. It comes from WORKBENCH_TRACE_KEY in the
environment of their launcher or, for ranks with the same parent process, from a file that only their user can read and
that the last writer removes.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path

KEY_BYTES = 32

TRY_SECONDS = 0.01
"""Time between two attempts to read a file that another rank writes."""


@contextlib.contextmanager
def run_key(run: str, environ: Mapping[str, str] = os.environ) -> Iterator[bytes]:
    """The key of a run, while it lasts.

    Args:
        run: A name that the ranks of a run share; "" for a run of one rank.
        environ: The environment.

    Yields:
        The key.

    Raises:
        OSError: The file cannot be written, or belongs to somebody else.
    """
    if given := environ.get("WORKBENCH_TRACE_KEY", ""):
        yield blake2b(given.encode("utf-8", "surrogateescape"), digest_size=KEY_BYTES).digest()
    elif not run:
        yield os.urandom(KEY_BYTES)
    else:
        import fcntl

        path = Path(tempfile.gettempdir()) / f"workbench-{os.getuid()}-{run}.key"
        descriptor, key = _shared(path)
        try:
            yield key
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while another rank records
                path.unlink(missing_ok=True)
            os.close(descriptor)


def _shared(path: Path) -> tuple[int, bytes]:
    """Open the file of a key, locked against its removal, and read the key."""
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path} can be read by others: remove it, or set WORKBENCH_TRACE_KEY")
        while True:
            if _locked(descriptor, fcntl.LOCK_EX):  # nobody uses it: it is new, or left over from a killed run
                os.pwrite(descriptor, os.urandom(KEY_BYTES), 0)
            if _locked(descriptor, fcntl.LOCK_SH):  # read again: another rank may have had it between the two locks
                key = os.pread(descriptor, KEY_BYTES, 0)
                if len(key) == KEY_BYTES and path.exists() and path.stat().st_ino == status.st_ino:
                    return descriptor, key
                break
            time.sleep(TRY_SECONDS)
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return _shared(path)  # it was removed meanwhile


def _locked(descriptor: int, kind: int) -> bool:
    import fcntl

    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
