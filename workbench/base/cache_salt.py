"""Cache salts and adapters: only requests with the same ones share blocks of the prefix cache, as in vLLM."""

from __future__ import annotations

import hmac
import secrets
from functools import cache
from typing import Any

from workbench.base.text import shown

MAX_SALT = 256
"""Maximum number of characters of a salt."""


def check_salt(name: str, value: Any) -> str:
    """The value as a salt.

    Raises:
        ValueError: It is not a string, or too long.

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
        ValueError: It is not a string, is too long, or has a character that cannot be printed.
    """
    if not isinstance(value, str) or len(value) > MAX_SALT or not value.isprintable():
        raise ValueError(f"{name} must be a string of 0 to {MAX_SALT} printable characters, got {shown(value)}")
    return value


def digest_of(salt: str, key: bytes | None = None) -> str:
    """A salt in place of another one that does not tell it: equal for equal salts of this process; "" stays "".

    Salts are often names, which a list of words finds: so the digest is made with a key that is stored nowhere.

    Args:
        salt: The salt.
        key: The key of a run, for processes that share one; None for the key of this process.

    Example:
        >>> digest_of("alice") == digest_of("alice") != digest_of("bob")
        True
    """
    if not salt:
        return ""
    return hmac.digest(key or _process_key(), salt.encode("utf-8", "surrogatepass"), "sha256").hex()[:16]


@cache
def _process_key() -> bytes:
    return secrets.token_bytes(32)
