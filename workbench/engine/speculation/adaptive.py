"""Adaptive speculation: fewer drafts for a request whose drafts are rejected."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PAUSE = 256
"""Maximum number of steps between two attempts of a request whose drafts are always rejected."""


@dataclass
class _Progress:
    """Present number of drafts of a request, and its pause once that is 0."""

    num_drafts: int
    pause: int = 8
    steps_left: int = 0


class AdaptiveDrafts:
    """Number of drafts of each request, by what became of the ones before.

    All drafts accepted: twice as many the next time. Fewer than half of them: half as many. At 0 the request pauses
    for 8 steps and tries one draft again; each failure doubles the pause.

    Args:
        most: Maximum number of drafts, ``num_speculative_tokens``.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._progress: dict[str, _Progress] = {}

    def next(self, request_id: str) -> int:
        """Number of drafts for the next step of a request; called once per step that samples for it."""
        progress = self._progress.get(request_id)
        if progress is None:
            return self.most
        if progress.steps_left:
            progress.steps_left -= 1
            return 0
        return max(1, progress.num_drafts)

    def note(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Take in what became of the drafts of a request; ``num_drafts`` is at least 1."""
        progress = self._progress.setdefault(request_id, _Progress(self.most))
        if num_accepted == num_drafts:
            progress.num_drafts = min(self.most, max(progress.num_drafts, num_drafts) * 2)
            progress.pause = 8
        elif 2 * num_accepted < num_drafts:
            progress.num_drafts = num_drafts // 2
            if not progress.num_drafts:
                progress.steps_left = progress.pause
                progress.pause = min(MAX_PAUSE, 2 * progress.pause)

    def forget(self, request_id: str) -> None:
        """Drop what is known about a request that has ended."""
        self._progress.pop(request_id, None)
