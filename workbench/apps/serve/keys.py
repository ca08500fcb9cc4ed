"""API keys: how they are named, read from a file, compared, and limited.

A file of keys has one key a line, behind its name, and may limit how often it is used::

    # name    key                     requests a minute
    alice     3f9c0d3e1b7a44c8a1e2
    batch     9d5e7b60c2f14e0b8d33    60

Only digests are kept. The digest of a given key is compared with all of them to the end, so the time tells neither how
much of the key is right nor whose it is.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base.field_checks import number

MAX_KEYS = 1000
MAX_FILE_BYTES = 1 << 20
MIN_LENGTH = 8
MAX_PER_MINUTE = 1e6
NAME = re.compile(r"[A-Za-z0-9_.-]{1,32}", re.ASCII)


@dataclass(frozen=True)
class ApiKey:
    """One key.

    Attributes:
        digest: SHA-256 of the key, in hexadecimal; a browser's cookie holds it, too.
        name: Name of its owner in request ids, the trace and the access log; "" for a key without a name.
        per_minute: Maximum number of POST requests per minute; None for no limit.
    """

    digest: str
    name: str = ""
    per_minute: float | None = None

    @classmethod
    def of(cls, key: str, name: str = "", per_minute: float | None = None) -> ApiKey:
        """Check a key and its limit, and keep the key's digest.

        Raises:
            ValueError: The key is too short, a character of it is not printable ASCII, or the limit is out of range.
        """
        if len(key) < MIN_LENGTH or not (key.isascii() and key.isprintable()) or " " in key:
            raise ValueError(
                f"api_key must have at least {MIN_LENGTH} characters, all of them ASCII and none of them a blank"
            )
        if per_minute is not None:
            number("max_requests_per_minute", per_minute, 0, MAX_PER_MINUTE, low_open=True)
        return cls(digest_of(key), name, per_minute)


def digest_of(text: str) -> str:
    """SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def read_api_keys(path: str | Path) -> tuple[ApiKey, ...]:
    """The keys of a file.

    Raises:
        ValueError: The file cannot be read or holds no key, or a line is not NAME KEY [REQUESTS_PER_MINUTE]. The
            message names the line and never shows the key.
    """
    where = f"--api-key-file {path}"
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        lines = data.decode("ascii").splitlines()
    except OSError as problem:
        raise ValueError(f"{where}: {problem.strerror or problem}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{where}: the file must be ASCII text") from None
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{where}: the file must have at most {MAX_FILE_BYTES} bytes")
    keys = []
    for index, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            keys.append(_read_line(words))
        except ValueError as problem:
            raise ValueError(f"{where}, line {index}: {problem}") from None
    if not 1 <= len(keys) <= MAX_KEYS:
        raise ValueError(f"{where}: the file must hold from 1 to {MAX_KEYS} keys, it has {len(keys)}")
    for what, values in (("name", [key.name for key in keys]), ("key", [key.digest for key in keys])):
        if len(set(values)) < len(values):
            raise ValueError(f"{where}: each {what} must be there once")
    return tuple(keys)


def _read_line(words: list[str]) -> ApiKey:
    if len(words) not in (2, 3):
        raise ValueError(f"expected NAME KEY [REQUESTS_PER_MINUTE], got {len(words)} words")
    name, key, *limit = words
    if not NAME.fullmatch(name):
        raise ValueError("the name must have from 1 to 32 letters, digits, '_', '.' or '-'")
    try:
        per_minute = float(limit[0]) if limit else None
    except ValueError:
        raise ValueError("max_requests_per_minute, the third word, must be a number") from None
    return ApiKey.of(key, name, per_minute)


class KeyRing:
    """The keys of a server, and how often each has been used.

    Args:
        keys: The keys.
        clock: Seconds, from any start.
    """

    def __init__(self, keys: Sequence[ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = tuple(keys)
        self._clock = clock
        # Each limited key may use its requests of a minute at once; they come back one by one.
        self._left = {key: (max(1.0, key.per_minute), clock()) for key in keys if key.per_minute is not None}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, given: str) -> ApiKey | None:
        """The key that a client has given, or None."""
        return self.find_digest(digest_of(given))

    def find_digest(self, given: str) -> ApiKey | None:
        """The key with this digest, or None; every key is compared, to the end."""
        encoded = given.encode("utf-8", "surrogatepass")
        found = None
        for key in self._keys:
            if hmac.compare_digest(encoded, key.digest.encode()):
                found = key
        return found

    def take(self, key: ApiKey) -> float:
        """Use a key once.

        Returns:
            0, or the seconds until the key may be used again, and it has not been used then.
        """
        if key.per_minute is None:
            return 0.0
        per_second = key.per_minute / 60
        left, then = self._left[key]
        now = self._clock()
        left = min(max(1.0, key.per_minute), left + (now - then) * per_second)
        if left < 1:
            self._left[key] = left, now
            return (1 - left) / per_second
        self._left[key] = left - 1, now
        return 0.0
