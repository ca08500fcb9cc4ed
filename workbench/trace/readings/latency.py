"""The one definition of every latency: the times at which requests arrive, get their tokens and end.

A token exists at the end of the step that sampled it (`workbench.trace.step_span`). Time is counted in steps as well,
because a simulation may have no clock: step k begins at k and ends at k + 1, so a request that arrives before step 3
and gets its first token in step 3 waited 1 step. In brackets: vLLM's Prometheus metric of the same meaning.

- TTFT [time_to_first_token_seconds]: from arrival to the first token. It is the sum of the time until a request is
  scheduled, from arrival to the first step that schedules it, and prefill time [request_prefill_time_seconds], from
  there to the first token. The first part is not vLLM's request_queue_time_seconds, which begins when the scheduler has
  the request: it also counts what the server does before that, such as tokenizing the prompt.
- ITL [inter_token_latency_seconds]: between two consecutive tokens of a request.
- Decode time [request_decode_time_seconds]: from the first token to the last.
- End-to-end latency [e2e_request_latency_seconds]: from arrival to the end of the step that finished the request. An
  aborted request ends before the step that leaves it out is scheduled.

A recording may omit token ids: then every chunk but a partial prefill gave its request a token, unless the request
failed. A trace may begin in the middle of a run: the first token of a request is the one sampled at the end of its
prompt. The latest tokens before the trace are known from its keyframe, or from the steps before a slice; a token whose
predecessor is not known has no latency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from workbench.trace.lines import LastToken

if TYPE_CHECKING:
    from workbench.trace.records import Chunk

FAILED = ("error", "abort")
"""Finish reasons of requests that got no token from the step in which they ended."""


class Latency(NamedTuple):
    """A span of time in both units.

    Attributes:
        steps: Engine steps.
        seconds: Wall-clock time; None when the trace has no clock.
    """

    steps: int
    seconds: float | None


@dataclass(slots=True, eq=False)
class Timestamp:
    """The start or the end of a step. Compared by identity: all tokens of a step share one object.

    Attributes:
        steps: k at the start of step k, k + 1 at its end.
        seconds: Time since the start of the trace.
    """

    steps: int
    seconds: float


class _Arriving(Protocol):
    """A RequestInfo or a scheduler's Request, as far as latencies depend on it."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def arrival_step(self) -> int: ...
    @property
    def arrival_time(self) -> float: ...


class _Step(Protocol):
    """A StepRecord or a scheduler's batch that is complete, as far as latencies depend on it."""

    @property
    def step(self) -> int: ...
    @property
    def time(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def timings(self) -> Mapping[str, float]: ...
    @property
    def chunks(self) -> Sequence[Any]: ...
    @property
    def admitted(self) -> tuple[str, ...]: ...
    @property
    def aborted(self) -> tuple[str, ...]: ...
    @property
    def finished(self) -> tuple[str, ...]: ...
    @property
    def finish_reasons(self) -> Mapping[str, str]: ...


class _Histogram(Protocol):
    """Counts values."""

    def add(self, value: float, times: int = 1, /) -> None:
        """Count a value, or several equal ones."""


class RequestTimes:
    """The timestamps of one request. A latency is None until both of its ends have been seen.

    Attributes:
        request: The request.
        first_scheduled: Start of the step that admitted it.
        first_token: End of the step that sampled its first token.
        last_token: End of the step that sampled its latest token.
        since: Start of the latency of its latest token: its arrival for the first token, the time of the token before
            for the others; None when that token is not known.
        token_before: Its latest token before the first record; None if there is none, or it is not known.
        end: Its end.
        tokens: The time of each of its tokens; None if they are not kept.
    """

    __slots__ = ("end", "first_scheduled", "first_token", "last_token", "request", "since", "token_before", "tokens")

    def __init__(self, request: _Arriving, *, keeps_tokens: bool = False) -> None:
        self.request = request
        self.tokens: list[Timestamp] | None = [] if keeps_tokens else None
        self.first_scheduled: Timestamp | None = None
        self.first_token: Timestamp | None = None
        self.since: Timestamp | None = None
        self.last_token: Timestamp | None = None
        self.token_before: LastToken | None = None
        self.end: Timestamp | None = None

    @property
    def arrival(self) -> Timestamp:
        """Its arrival."""
        return Timestamp(self.request.arrival_step, self.request.arrival_time)

    @property
    def queue(self) -> Latency | None:
        """From arrival to being scheduled."""
        return span(self.arrival, self.first_scheduled)

    @property
    def prefill(self) -> Latency | None:
        """From being scheduled to the first token."""
        return span(self.first_scheduled, self.first_token)

    @property
    def ttft(self) -> Latency | None:
        """From arrival to the first token."""
        return span(self.arrival, self.first_token)

    @property
    def decode(self) -> Latency | None:
        """From the first token to the last."""
        return span(self.first_token, self.last_token)

    @property
    def e2e(self) -> Latency | None:
        """From arrival to the end."""
        return span(self.arrival, self.end)


def span(begin: Timestamp | None, end: Timestamp | None) -> Latency | None:
    """The time between two timestamps; None if one of them has not been seen."""
    if begin is None or end is None:
        return None
    return Latency(end.steps - begin.steps, end.seconds - begin.seconds)


@dataclass(slots=True, eq=False)
class StepTimes:
    """The effect of one step on the latencies of its requests.

    Attributes:
        end: End of the step: the time of its tokens.
        previous_end: End of the step before.
        first_tokens: Requests that got their first token, by id.
        num_following: Number of tokens that follow a token of the step before: nearly all, and they share one gap.
        previous_tokens: For each other token, the time of the request's token before it; tokens whose predecessor is
            not known are left out.
        ended: Requests that ended with this step or were aborted before it, by id.
    """

    end: Timestamp
    previous_end: Timestamp
    first_tokens: dict[str, RequestTimes]
    num_following: int
    previous_tokens: list[Timestamp]
    ended: dict[str, RequestTimes]

    def add_to(self, ttft: _Histogram, itl: _Histogram, e2e: _Histogram) -> None:
        """Add the latencies that end with this step to histograms of seconds."""
        now = self.end.seconds
        for times in self.first_tokens.values():
            ttft.add(now - times.request.arrival_time)
        if self.num_following:
            itl.add(now - self.previous_end.seconds, self.num_following)
        for previous in self.previous_tokens:
            itl.add(now - previous.seconds)
        for times in self.ended.values():
            assert times.end is not None
            e2e.add(times.end.seconds - times.request.arrival_time)


class LatencyAccumulator:
    """Follows requests from arrival to end through the records of a run, and forgets them then.

    Requests that have not been passed to ``arrive`` are ignored.

    Args:
        keeps_tokens: Keep the time of every token, in the request's timestamps.

    Attributes:
        timed: Whether a record had a time. Until then the run has no clock, and seconds have no meaning.
    """

    def __init__(self, *, keeps_tokens: bool = False) -> None:
        self.timed = False
        self._keeps_tokens = keeps_tokens
        self._open: dict[str, RequestTimes] = {}
        self._previous_end = Timestamp(0, 0.0)

    def arrive(self, request: _Arriving) -> RequestTimes:
        """Add a request before the first record that names it, and return its timestamps, which ``add`` fills in."""
        times = self._open[request.request_id] = RequestTimes(request, keeps_tokens=self._keeps_tokens)
        return times

    def start_from(self, last_tokens: Mapping[str, LastToken]) -> None:
        """Take the latest tokens before the first record, of requests that have been added."""
        for request_id, token in last_tokens.items():
            if (times := self._open.get(request_id)) is not None:
                times.token_before, times.last_token = token, Timestamp(token.step + 1, token.end)

    def last_tokens(self, step: int) -> dict[str, LastToken]:
        """The latest tokens before a step, of requests that have not ended; none if the step before is not here yet."""
        if self._previous_end.steps != step:
            return {}
        latest = {request_id: times.last_token for request_id, times in self._open.items()}
        return {name: LastToken(token.steps - 1, token.seconds) for name, token in latest.items() if token is not None}

    def get(self, request_id: str) -> RequestTimes | None:
        """The timestamps of a request that has not ended; None when there is no such request."""
        return self._open.get(request_id)

    def add_decodes(self, record: _Step, ends: Sequence[float]) -> None:
        """Add the steps before the next record that it stands for: each of its chunks got a token at each end."""
        if not ends:
            return
        tokens = [Timestamp(record.step, end) for end in ends]
        for times in [self._open[chunk.request_id] for chunk in record.chunks]:
            times.last_token = tokens[-1]
            if times.tokens is not None:
                times.tokens += tokens
        self._previous_end = tokens[-1]

    def add(self, record: _Step) -> StepTimes:
        """Add the next record."""
        open_requests = self._open
        self.timed = self.timed or record.end > 0 or bool(record.timings)
        end = Timestamp(record.step + 1, record.end)
        ended: dict[str, RequestTimes] = {}
        if record.admitted or record.aborted:
            start = Timestamp(record.step, record.time)
            self._end(record.aborted, start, ended)
            for request_id in record.admitted:
                if (times := open_requests.get(request_id)) is not None and times.first_scheduled is None:
                    times.first_scheduled = start
        first_tokens: dict[str, RequestTimes] = {}
        num_following = 0
        keeps_tokens = self._keeps_tokens
        previous_tokens: list[Timestamp] = []
        previous_end, self._previous_end = self._previous_end, end
        for chunk in record.chunks:
            times = open_requests.get(chunk.request_id)
            if times is None or (chunk.sampled is None and not _token_left_out(chunk, record, times.request)):
                continue
            times.since = previous = times.last_token
            times.last_token = end
            if keeps_tokens:
                times.tokens.append(end)  # type: ignore[union-attr]
            if previous is previous_end:
                num_following += 1
            elif previous is not None:
                previous_tokens.append(previous)
            elif chunk.num_kv - len(chunk.drafts) == times.request.num_prompt_tokens:
                times.first_token = end
                times.since = times.arrival
                first_tokens[chunk.request_id] = times
            if chunk.sampled_before:  # accepted drafts: further tokens at the same time
                further = [end] * len(chunk.sampled_before)
                previous_tokens.extend(further)
                if keeps_tokens:
                    times.tokens.extend(further)  # type: ignore[union-attr]
        for request_id in record.finished:
            times = open_requests.get(request_id)
            # An asynchronous step is scheduled before the last output of the one before it is known: the request ended
            # with its last token.
            has_token = times is not None and record.finish_reasons.get(request_id) not in FAILED
            last_token = times.last_token if times is not None and has_token else None
            self._end((request_id,), last_token or end, ended)
        return StepTimes(end, previous_end, first_tokens, num_following, previous_tokens, ended)

    def _end(self, request_ids: Sequence[str], when: Timestamp, ended: dict[str, RequestTimes]) -> None:
        for request_id in request_ids:
            if (times := self._open.pop(request_id, None)) is not None:
                times.end = when
                ended[request_id] = times


def gives_token(chunk: Chunk, record: _Step, request: _Arriving) -> bool:
    """Whether a chunk gave its request a token, also one whose id the recording omits."""
    return chunk.sampled is not None or _token_left_out(chunk, record, request)


def _token_left_out(chunk: Chunk, record: _Step, request: _Arriving) -> bool:
    """Whether a chunk gave its request a token whose id the recording omits."""
    if chunk.is_partial_prefill or chunk.discarded or request.prompt_token_ids:
        return False
    return record.finish_reasons.get(chunk.request_id) not in FAILED
