"""The drafts of a recorded request: how many were proposed at each place of its output, and how many accepted."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

_counts = partial(array, "i")


class Proposal(NamedTuple):
    """The drafts that a request gets at one place of its output.

    Attributes:
        num_drafts: Number of drafts.
        num_accepted: Number of them that the verification accepts.
    """

    num_drafts: int
    num_accepted: int


@dataclass
class RecordedProposals:
    """The proposals of a recorded request, by their places in its output.

    A changed run may come to a place among the tokens that one recorded verification gave. It has as many drafts there;
    those that were accepted from there on are accepted again, and one more if all were. Beyond the recorded output the
    proposals repeat from the first. If the recording tells nothing, as many drafts as allowed are rejected.

    Attributes:
        places: For each proposal the number of output tokens before it, in order.
        num_drafts: Number of its drafts.
        num_accepted: Number of those that were accepted.
    """

    places: array[int] = field(default_factory=_counts)
    num_drafts: array[int] = field(default_factory=_counts)
    num_accepted: array[int] = field(default_factory=_counts)

    def add(self, place: int, proposal: Proposal) -> None:
        """Add the next proposal; only the first at its place, as a request that begins again has none."""
        if not self.places or self.places[-1] < place:
            self.places.append(place)
            self.num_drafts.append(proposal.num_drafts)
            self.num_accepted.append(proposal.num_accepted)

    def at(self, place: int, most: int) -> Proposal:
        """The proposal at a place.

        Args:
            place: Number of output tokens before it.
            most: Number of drafts that are allowed.
        """
        if self.places:
            first, end = self.places[0], self.places[-1] + self.num_accepted[-1] + 1
            if place >= end:
                place = first + (place - first) % (end - first)
        index = bisect_right(self.places, place) - 1
        passed = place - self.places[index] if index >= 0 else 0
        if index < 0 or passed > self.num_accepted[index]:
            return Proposal(most, 0)
        num_drafts, num_accepted = self.num_drafts[index], self.num_accepted[index]
        one_more = passed > 0 and num_accepted == num_drafts
        return Proposal(num_drafts, num_accepted - passed + one_more)
