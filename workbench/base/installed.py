"""Versions of installed packages, without ``importlib.metadata``, which takes 60 ms to import."""

from __future__ import annotations

import os
import re
import sys
from functools import cache

_METADATA = ".dist-info"


def installed_version(package: str) -> str | None:
    """The version of an installed package, None if it is not installed.

    It is part of the name of the folder of metadata that pip and others leave beside a package. A package without such
    a folder is looked up with ``importlib.metadata``.
    """
    name = _normal(package)
    for folder in sys.path:
        if found := _versions_in(folder or ".").get(name):
            return found
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


@cache
def _versions_in(folder: str) -> dict[str, str]:
    """The versions of the packages in a folder, by their normal names."""
    try:
        names = os.listdir(folder)
    except OSError:  # such as a zip file on the path
        return {}
    parts = (name.removesuffix(_METADATA).partition("-") for name in names if name.endswith(_METADATA))
    return {_normal(name): version for name, _, version in parts}
