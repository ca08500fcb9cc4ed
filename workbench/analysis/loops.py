"""Follow-ups in a recording: requests whose prompt contains the answer to an earlier one, and the time between.

People and agents read an answer before they ask again. Under another setting the answer comes at another time, and so
does what follows it. No recording says which request follows which, but its contents do: if a block of a prompt holds
output of an earlier request, its author has read that output. An answer that fills no block leaves no such sign. Then
a prompt that continues an earlier one, is longer by the answer, and shares a block with it that no other user has,
follows it, in a recording that has follow-ups beyond doubt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, NamedTuple

from workbench.base.text import counted
from workbench.simulation.arrivals import Arrival
from workbench.trace import Trace
from workbench.trace.readings.contents import Contents
from workbench.trace.readings.metrics import amount

TOKENS_PER_BLOCK = 4
"""Tokens that are compared at a time in a recording with token ids; one alone may be equal by chance."""


class Turn(NamedTuple):
    """A request of a recording, as far as it can follow another one.

    Attributes:
        request_id: The request.
        num_prompt_tokens: Length of its prompt.
        num_tokens: Length of its prompt and its output.
        blocks: A number for the content of each full block with all before it; equal numbers are equal prefixes.
        block_size: Tokens in a block.
        arrival: Step and time of its arrival.
        end: The step after its end, and its time; None if it did not end.
    """

    request_id: str
    num_prompt_tokens: int
    num_tokens: int
    blocks: Sequence[int]
    block_size: int
    arrival: tuple[int, float]
    end: tuple[int, float] | None

    @property
    def prompt(self) -> Sequence[int]:
        """The blocks that the prompt fills."""
        return self.blocks[: self.num_prompt_tokens // self.block_size]

    @property
    def answer(self) -> Sequence[int]:
        """The blocks that hold output."""
        return self.blocks[self.num_prompt_tokens // self.block_size :]


class FollowUp(NamedTuple):
    """A request that waited for the end of another one.

    Attributes:
        after: The other request.
        think: Seconds between that end and the arrival.
        think_steps: Steps between them.
        evidence: "answer" if its prompt contains blocks of the answer, "prompt" if it continues the whole prompt.
    """

    after: str
    think: float
    think_steps: int
    evidence: Literal["answer", "prompt"]


@dataclass(frozen=True)
class Loops:
    """The follow-ups of a recording, by request.

    Attributes:
        follow_ups: The follow-ups.
        num_requests: Number of all requests.
    """

    follow_ups: Mapping[str, FollowUp]
    num_requests: int

    def __str__(self) -> str:
        """A sentence about them, with the option that ignores them; "" for none."""
        return f"{self.sentence}; --open-loop keeps the recorded arrival times" if self.follow_ups else ""

    @property
    def sentence(self) -> str:
        """Their number, the reason, and the times at which they arrive; "" for none."""
        if not self.follow_ups:
            return ""
        thinking = median(each.think for each in self.follow_ups.values())
        by_prompt = sum(each.evidence == "prompt" for each in self.follow_ups.values())
        others = f" ({by_prompt} continue its whole prompt, behind an answer of less than a block)" if by_prompt else ""
        return (
            f"{len(self.follow_ups)} of {counted(self.num_requests, 'request')} are follow-ups: their prompts contain "
            f"the answer to an earlier request{others}; each arrives when that answer has ended and its recorded think "
            f"time (median {amount(thinking, 's')}) has passed"
        )

    def tie(self, arrival: Arrival) -> Arrival:
        """The arrival of a request, tied to the end of the one that it follows."""
        if (found := self.follow_ups.get(arrival.request_id)) is None:
            return arrival
        return replace(arrival, after=found.after, think=found.think, think_steps=found.think_steps)

    def in_sessions(self, arrivals: Iterable[Arrival]) -> list[Arrival]:
        """Some arrivals, each with the first request of its conversation as its session if it has one."""
        first: dict[str, str] = {}
        for request_id, found in self.follow_ups.items():  # in order of arrival
            first[request_id] = first.setdefault(found.after, found.after)
        return [replace(each, session=first.get(each.request_id, each.session)) for each in arrivals]

    def num_impossible(self, spans: Mapping[str, tuple[float, float | None]]) -> int:
        """Number of follow-ups that arrive before the answer in them has ended.

        Args:
            spans: Arrival and end of each request; None for no end.
        """
        count = 0
        for request_id, found in self.follow_ups.items():
            if request_id in spans and found.after in spans:
                end = spans[found.after][1]
                count += end is None or spans[request_id][0] < end - CLOCK
        return count


CLOCK = 1e-6
"""Differences of times below this one are rounding."""

NO_LOOPS = Loops({}, 0)


def loops_of(trace: Trace, contents: Contents | None = None) -> Loops:
    """The follow-ups of a recording.

    Args:
        trace: The recording.
        contents: Says which prefixes are equal; None to read it from the trace.
    """
    return find_loops(turns_of(trace, contents or Contents(trace)))


def turns_of(trace: Trace, contents: Contents, late: float = 0.0) -> Iterator[Turn]:
    """The requests of a recording, with their contents.

    Args:
        trace: The recording.
        contents: Says which prefixes are equal; recordings that are compared share its numbers.
        late: Seconds to add to the times of the recording.
    """
    lengths: dict[str, int] = {name: info.num_prompt_tokens for name, info in trace.requests.items()}
    outputs: dict[str, list[int]] = defaultdict(list)
    num_output: dict[str, int] = defaultdict(int)
    ends: dict[str, tuple[int, float]] = {}
    last_token: dict[str, float] = {}
    for record in trace:
        for chunk in record.chunks:
            if chunk.sampled is not None:
                num_output[chunk.request_id] += 1 + len(chunk.sampled_before)
                if contents.kind == "tokens":
                    outputs[chunk.request_id] += chunk.accepted
                last_token[chunk.request_id] = record.end
        for name in record.finished:
            ends[name] = record.step + 1, last_token.get(name, record.end) + late
        for name in record.aborted:
            ends[name] = record.step, record.time + late
    chains: dict[tuple[int, tuple[int, ...]], int] = {}
    for name, info in trace.requests.items():
        size = contents.block_size if contents.kind != "tokens" else TOKENS_PER_BLOCK
        if contents.kind == "tokens":
            blocks = _chained(chains, [*info.prompt_token_ids, *outputs[name]], size)
        else:
            blocks = contents.blocks(name)
        arrival = info.arrival_step, info.arrival_time + late
        yield Turn(name, lengths[name], lengths[name] + num_output[name], blocks, size, arrival, ends.get(name))


def _chained(known: dict[tuple[int, tuple[int, ...]], int], tokens: Sequence[int], size: int) -> list[int]:
    """A number for each full block with all before it."""
    blocks: list[int] = []
    before = 0
    for end in range(size, len(tokens) + 1, size):
        before = known.setdefault((before, tuple(tokens[end - size : end])), len(known) + 1)
        blocks.append(before)
    return blocks


def find_loops(turns: Iterable[Turn]) -> Loops:
    """The follow-ups among some requests, each tied to the longest request that its prompt continues.

    Args:
        turns: The requests, of one recording or of several.
    """
    ordered = sorted(turns, key=lambda turn: (turn.arrival[1], turn.arrival[0]))
    answers: dict[int, list[Turn]] = defaultdict(list)  # by a block that holds output
    prompts: dict[int, list[Turn]] = defaultdict(list)  # by the last full block of a prompt
    for turn in ordered:
        for block in turn.answer:
            answers[block].append(turn)
        if turn.prompt:
            prompts[turn.prompt[-1]].append(turn)
    private = _of_one_user(ordered)
    found: dict[str, FollowUp] = {}
    for turn in ordered:
        said = {each.request_id: each for block in turn.prompt for each in answers.get(block, ())}
        begun = {each.request_id: each for block in turn.prompt if block in private for each in prompts.get(block, ())}
        before = [each for each in (begun | said).values() if _can_follow(turn, each)]
        if before:
            other = max(before, key=lambda each: (each.num_tokens, each.end))
            found[turn.request_id] = _follow_up(turn, other, "answer" if other.request_id in said else "prompt")
    if all(follow_up.evidence == "prompt" for follow_up in found.values()):
        found = {}
    return Loops(found, len(ordered))


def _of_one_user(ordered: Iterable[Turn]) -> set[int]:
    """Blocks of prompts that only one conversation has: each request with it can follow the one before."""
    last: dict[int, Turn | None] = {}  # None once two users have the block
    for turn in ordered:
        for block in turn.prompt:
            before = last.get(block, turn)
            last[block] = turn if before is turn or (before is not None and _can_follow(turn, before)) else None
    return {block for block, turn in last.items() if turn is not None}


def _can_follow(turn: Turn, other: Turn) -> bool:
    """Whether a request is longer than another one with its answer, and arrived after its end."""
    is_longer = turn.num_prompt_tokens >= other.num_tokens and turn.num_prompt_tokens > other.num_prompt_tokens
    return is_longer and other.end is not None and other.end[1] <= turn.arrival[1] + CLOCK


def _follow_up(turn: Turn, other: Turn, evidence: Literal["answer", "prompt"]) -> FollowUp:
    assert other.end is not None
    think, steps = turn.arrival[1] - other.end[1], turn.arrival[0] - other.end[0]
    return FollowUp(other.request_id, max(0.0, think), max(0, steps), evidence)
