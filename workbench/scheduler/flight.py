"""The part of a request that runs ahead of its known tokens: drafts, and output that is to come."""

from __future__ import annotations

import copy
from collections.abc import Sequence


class Flight:
    """The part of a request that runs ahead of its known tokens.

    Attributes:
        drafts: Draft tokens that its next chunk verifies; -1 for one that is not known yet.
        placeholders: Output tokens that scheduled steps will give it, drafts included, and that are not known yet.
        num_tokens: Tokens of its chunks whose step has not been updated yet; counted in asynchronous steps only.
        stale: Those of them that were scheduled before its latest preemption.
    """

    __slots__ = ("drafts", "num_tokens", "placeholders", "stale")

    def __init__(self) -> None:
        self.drafts: Sequence[int] = ()
        self.placeholders = self.num_tokens = self.stale = 0

    def copy(self) -> Flight:
        """The same numbers, to be changed without changing these."""
        return copy.copy(self)
