"""The engines of this process, for what a step alone cannot answer: the engine that has taken it."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

LIVE: WeakSet[Any] = WeakSet()
"""Every engine that exists, closed ones included."""
