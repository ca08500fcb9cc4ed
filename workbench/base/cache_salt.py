"""Cache salts and adapters: only requests with the same ones share blocks of the prefix cache, as in vLLM."""

from __future__ import annotations

import hashlib
from typing import Any

from workbench.base.field_checks import shown

MAX_SALT = 256
"""Maximum number of characters of a salt."""


def check_salt(name: str, value: Any) -> str:
    """The value as a salt.

    Raises:
        ValueError: It is no string, or too long.

    Example:
        >>> check_salt("cache_salt", "alice")
        'alice'
    """
    if not isinstance(value, str) or len(value) > MAX_SALT:
        raise ValueError(f"{name} must be a string of 0 to {MAX_SALT} characters, got {shown(value)}")
    return value


def check_adapter(name: str, value: Any) -> str:
    """The value as the name of an adapter.

    Raises:
        ValueError: It is no string, is too long, or has a character that cannot be printed.
    """
    if not isinstance(value, str) or len(value) > MAX_SALT or not value.isprintable():
        raise ValueError(f"{name} must be a string of 0 to {MAX_SALT} printable characters, got {shown(value)}")
    return value


def digest_of(salt: str) -> str:
    """A salt in place of another one that does not tell it: equal for equal salts; "" stays "".

    Example:
        >>> digest_of("alice")
        '2bd806c97f0e00af'
    """
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()[:16] if salt else ""
