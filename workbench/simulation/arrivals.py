"""The requests of a simulation: arrival processes, length distributions and recorded workloads.

All of them are iterators, so that a million requests take no more memory than those that have not ended. Prompts
consist of numbers that are equal exactly as far as prompts share a prefix; without a model nothing else matters.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import Any

from workbench.base.field_checks import MAX_INT32, choice, integer, items, json_object, number
from workbench.base.text import shown
from workbench.config import EngineConfig, SamplingParams
from workbench.scheduler.admission import check_servable
from workbench.scheduler.request import Request
from workbench.simulation.limits import MAX_PROMPT_TOKENS
from workbench.simulation.log_rows import json_rows
from workbench.simulation.log_tables import CONVERSATION_RULES, RULES, column_check
from workbench.simulation.log_turns import first_exchange
from workbench.simulation.log_units import MOONCAKE_BLOCK, SECONDS, Hashed, UnitOfTime, block_sizes
from workbench.simulation.proposals import RecordedProposals
from workbench.trace.fields import MAX_SECONDS

Lengths = Callable[[random.Random], int]
"""Draws a number of tokens."""

OWN_TOKENS = 2**30
"""Made-up tokens from this number on belong to one request; smaller ones are those of shared blocks."""


@dataclass(frozen=True)
class GrammarArrival:
    """The grammar of a request's output, as far as the scheduler sees it.

    Attributes:
        ready_step: First step whose scheduling sees it compiled.
        valid_drafts: Drafts that it allows in each proposal, from the first again after the last; empty for all.
        fails: It cannot be compiled, which that step finds out.
    """

    ready_step: int = 0
    valid_drafts: tuple[int, ...] = ()
    fails: bool = False


@dataclass(frozen=True)
class Arrival:
    """A request of a workload.

    Attributes:
        request_id: Unique name.
        prompt_token_ids: The prompt.
        sampling: Limits of the output.
        priority: Smaller is served first under the "priority" policy.
        arrival_step: First step whose scheduling sees the request.
        arrival_time: Decides between equal priorities.
        abort_step: Step before which the request is aborted; None for never.
        arrives_at: Seconds since the start before which a simulation with a clock does not see the request; None for
            no such limit.
        timeout: Seconds after ``arrival_time`` before which a simulation with a clock does not abort it; None for no
            such limit.
        index: Place in the workload, which decides between requests that are aborted before the same step.
        cache_salt: Only requests with the same salt share prefixes.
        adapter: Name of the adapter (LoRA) that it is computed with; "" for the model alone.
        session: Its session, by which routers keep requests together; "" if it is alone.
        accepts: Drafts accepted in each verification, from the first again after the last; empty for none.
        proposals: Drafts and accepted ones by their places in the output, as a recording has them; None for as many
            drafts as allowed, of which ``accepts`` are accepted.
        grammar: When the grammar of its output is compiled; None if it has none.
        after: The request whose end it waits for; its own times count only if that one is not in the run. "" for none.
        think: Seconds between that end and its arrival.
        think_steps: Steps between them, in a simulation without a clock.
        copy_of: The request that another user's is made from; "" for none.
        copy: Number of that user, from 1; 0 for none.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    priority: int = 0
    arrival_step: int = 0
    arrival_time: float = 0.0
    abort_step: int | None = None
    arrives_at: float | None = None
    timeout: float | None = None
    index: int = 0
    accepts: tuple[int, ...] = ()
    proposals: RecordedProposals | None = None
    cache_salt: str = ""
    adapter: str = ""
    session: str = ""
    grammar: GrammarArrival | None = None
    after: str = ""
    think: float = 0.0
    think_steps: int = 0
    copy_of: str = ""
    copy: int = 0

    @property
    def max_tokens(self) -> int:
        """Maximum number of output tokens."""
        return self.sampling.max_tokens

    def to_request(self) -> Request:
        """A fresh request for a scheduler."""
        return Request(
            self.request_id,
            self.prompt_token_ids,
            self.sampling,
            priority=self.priority,
            arrival_time=self.arrival_time,
            arrival_step=self.arrival_step,
            cache_salt=self.cache_salt,
            adapter=self.adapter,
        )

    def check_servable(self, config: EngineConfig, sample_token: Callable[[Request], int]) -> None:
        """Refuse a request that no schedule can serve, unless it is aborted.

        Args:
            config: The configuration.
            sample_token: Gives its next token: it may end before ``max_tokens``.

        Raises:
            ValueError: The message names the field that is too small.
        """
        if self.abort_step is not None:
            return
        name = f"request {self.request_id!r}"
        try:
            check_servable(config, len(self.prompt_token_ids), self.sampling.max_tokens, name)
        except ValueError:
            if not self.sampling.stop_token_ids:
                raise
            request = self.to_request()
            while request.num_output_tokens < self.sampling.max_tokens:
                request.token_ids.append(sample_token(request))
                if request.token_ids[-1] in request.stop_token_ids:
                    break
            check_servable(config, request.num_prompt_tokens, request.num_output_tokens, name)


def arrival_order(arrival: Arrival) -> tuple[int, float]:
    """Key that sorts requests as a simulation sees them; those with equal keys keep their order."""
    return arrival.arrival_step, arrival.arrives_at or 0.0


def timed_arrival(
    request_id: str, prompt: Sequence[int], max_tokens: int, at: float, *, priority: int = 0, session: str = ""
) -> Arrival:
    """A request that arrives at a time and not before a step.

    Args:
        request_id: Unique name.
        prompt: Token ids.
        max_tokens: Output tokens.
        at: Seconds since the start.
        priority: Smaller is served first under the "priority" policy.
        session: Its session; "" if it is alone.
    """
    sampling = _sampling(max_tokens)
    return Arrival(request_id, prompt, sampling, priority, arrival_time=at, arrives_at=at, session=session)


@lru_cache(maxsize=4096)
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


# -- arrival processes: seconds since the start, in order ----------------------------------------------------------


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Independent arrivals, ``rate`` per second on average."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def bursts(rate: float, size: int, rng: random.Random) -> Iterator[float]:
    """Groups of ``size`` requests at independent times, ``rate`` requests per second on average."""
    for now in poisson(rate / size, rng):
        yield from repeat(now, size)


def evenly(rate: float) -> Iterator[float]:
    """One request every ``1 / rate`` seconds."""
    index = 0
    while True:
        yield index / rate
        index += 1


# -- lengths ---------------------------------------------------------------------------------------------------------


def read_lengths(place: str, spec: Any) -> Lengths:
    """A length distribution from its description.

    Args:
        place: Place of the description in the workload, for messages.
        spec: A number of tokens; ``{"choices": [[weight, tokens], ...]}``; ``{"uniform": [low, high]}``; or
            ``{"lognormal": {"median": m, "sigma": s, "min": low, "max": high}}``, which resembles real prompts.

    Raises:
        ValueError: The description is none of these, or a value is outside its range.
    """
    if isinstance(spec, Mapping) and len(spec) == 1:
        ((kind, value),) = spec.items()
        if kind == "choices" and isinstance(value, Sequence) and value and all(map(_is_pair, value)):
            weights = [number(f"{place}.choices weight", pair[0], 0.0) for pair in value]
            tokens = [integer(f"{place}.choices tokens", pair[1], 1, MAX_PROMPT_TOKENS) for pair in value]
            number(f"{place}.choices, the sum of the weights,", sum(weights), 0.0, low_open=True)
            return lambda rng: rng.choices(tokens, weights)[0]
        if kind == "uniform" and _is_pair(value):
            low = integer(f"{place}.uniform[0]", value[0], 1, MAX_PROMPT_TOKENS)
            high = integer(f"{place}.uniform[1]", value[1], low, MAX_PROMPT_TOKENS)
            return lambda rng: rng.randint(low, high)
        if kind == "lognormal" and isinstance(value, Mapping) and set(value) <= {"median", "sigma", "min", "max"}:
            mu = math.log(number(f"{place}.lognormal.median", value.get("median"), 1.0))
            sigma = number(f"{place}.lognormal.sigma", value.get("sigma"), 0.0)
            low = integer(f"{place}.lognormal.min", value.get("min", 1), 1, MAX_PROMPT_TOKENS)
            high = integer(f"{place}.lognormal.max", value.get("max", MAX_PROMPT_TOKENS), low, MAX_PROMPT_TOKENS)
            return lambda rng: min(high, max(low, round(rng.lognormvariate(mu, sigma))))
    if isinstance(spec, int) and not isinstance(spec, bool):
        tokens_each = integer(place, spec, 1, MAX_PROMPT_TOKENS)
        return lambda rng: tokens_each
    raise ValueError(
        f'{place} must be a number of tokens, {{"choices": [[weight, tokens], ...]}}, {{"uniform": [low, high]}} or '
        f'{{"lognormal": {{"median", "sigma", "min", "max"}}}}, got {shown(spec)}'
    )


def _is_pair(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) == 2


def generate(
    num_requests: int, times: Iterable[float], prompt: Lengths, output: Lengths, rng: random.Random
) -> Iterator[Arrival]:
    """Requests of drawn lengths that share no prefix.

    Args:
        num_requests: Number of requests.
        times: Times of arrival, in order; one of the arrival processes.
        prompt: Prompt lengths.
        output: Output lengths.
        rng: Source of the lengths.
    """
    for index, at in zip(range(num_requests), times):
        yield timed_arrival(f"r{index}", [index] * prompt(rng), output(rng), at)


def read_generated(spec: Mapping[str, Any]) -> Iterator[Arrival]:
    """Requests from the description that a workload has under ``generate``.

        {"num_requests": 1000, "seed": 0, "prompt": 500, "output": {"uniform": [1, 128]},
         "arrivals": {"process": "poisson", "rate": 12.5}}

    ``process`` is "poisson", "bursts" (with "size"), "evenly", or "at_once".

    Raises:
        ValueError: The description is malformed; the message names the place.

    Example:
        >>> from workbench import read_generated
        >>> at_once = {"process": "at_once"}
        >>> arrivals = read_generated({"num_requests": 3, "prompt": 500, "output": 8, "arrivals": at_once})
        >>> [(arrival.request_id, len(arrival.prompt_token_ids)) for arrival in arrivals]
        [('r0', 500), ('r1', 500), ('r2', 500)]
    """
    json_object("generate", spec, ("num_requests", "seed", "prompt", "output", "arrivals"))
    seed = integer("generate.seed", spec.get("seed", 0), 0)
    num_requests = integer("generate.num_requests", spec.get("num_requests"), 1)
    prompt = read_lengths("generate.prompt", spec.get("prompt"))
    output = read_lengths("generate.output", spec.get("output"))
    process = spec.get("arrivals") or {"process": "at_once"}
    times = read_process("generate.arrivals", process, random.Random(f"arrivals {seed}"))
    return generate(num_requests, times, prompt, output, random.Random(f"lengths {seed}"))


def read_process(place: str, spec: Any, rng: random.Random) -> Iterator[float]:
    """Times of arrival from the description of a process: "poisson", "bursts" (with "size"), "evenly" or "at_once".

    Args:
        place: Place of the description in the workload, for messages.
        spec: ``{"process": name, "rate": requests per second}``.
        rng: Source of the times.

    Raises:
        ValueError: The description is malformed.
    """
    process = json_object(place, spec, ("process", "rate", "size")).get("process")
    fields = {"poisson": ("rate",), "bursts": ("rate", "size"), "evenly": ("rate",), "at_once": ()}
    if process not in fields:
        raise ValueError(f'{place}.process must be "poisson", "bursts", "evenly" or "at_once", got {shown(process)}')
    for name, value in spec.items():
        if name != "process" and name not in fields[process] and value is not None:
            raise ValueError(f"{place}.{name} {shown(value)} has no effect on the process {process}: leave it out")
    if process == "at_once":
        return repeat(0.0)
    rate = number(f"{place}.rate", spec.get("rate"), 0.0, low_open=True)
    if process == "poisson":
        return poisson(rate, rng)
    if process == "evenly":
        return evenly(rate)
    return bursts(rate, integer(f"{place}.size", spec.get("size"), 1), rng)


# -- recorded workloads ------------------------------------------------------------------------------------------------


def read_mooncake(
    path: str | os.PathLike[str],
    *,
    speed: float = 1.0,
    time_unit: UnitOfTime = "ms",
    block_size: int = MOONCAKE_BLOCK,
) -> Iterator[Arrival]:
    """Requests of a Mooncake-style trace, one by one.

    Its lines have timestamp, input_length, output_length and hash_ids. Two prompts share a prefix as far as their
    ``hash_ids`` agree.

    Args:
        path: The file; its lines are in order of time.
        speed: Factor by which requests arrive faster than in the trace.
        time_unit: Unit of timestamp: "s", "ms", "us" or "ns".
        block_size: Tokens that each of the ``hash_ids`` stands for.

    Raises:
        ValueError: A line is malformed, or its ``hash_ids`` do not fit its length; the message names it.
    """
    seconds = SECONDS[choice("time_unit", time_unit, tuple(SECONDS))]
    columns = column_check()
    for index, (place, line) in enumerate(json_rows(path)):
        columns.check(place.removesuffix(":"), line, RULES)
        length = integer(f"{place} input_length", line.get("input_length"), 1, MAX_PROMPT_TOKENS)
        output = integer(f"{place} output_length", line.get("output_length"), 0, MAX_INT32)
        at = number(f"{place} timestamp", line.get("timestamp"), 0.0, MAX_SECONDS / seconds) * seconds
        hash_ids = items(f"{place} hash_ids", line.get("hash_ids"), "numbers")
        blocks = [integer(f"{place} hash_ids", hash_id, 0) for hash_id in hash_ids]
        block_sizes(path, [Hashed(place, length, blocks)], block_size)
        yield timed_arrival(f"r{index}", made_up_prompt(index, length, blocks, block_size), max(1, output), at / speed)


def made_up_prompt(index: int, length: int, blocks: Sequence[int] = (), block_size: int = 1) -> list[int]:
    """A prompt that shares a prefix with other ones as far as their blocks are the same.

    Args:
        index: Number of the request; tokens after the blocks are its own, and no block's.
        length: Number of tokens.
        blocks: A number of 0 or more for the content of each block.
        block_size: Tokens in a block.
    """
    prompt = [block for block in blocks[: -(-length // block_size)] for _ in range(block_size)]
    return prompt[:length] + [OWN_TOKENS + index] * (length - len(prompt))


def _quarter_of_characters(text: str) -> int:
    return max(1, len(text) // 4)


def read_sharegpt(
    path: str | os.PathLike[str],
    times: Iterable[float],
    *,
    count_tokens: Callable[[str], int] = _quarter_of_characters,
    ignore_columns: Collection[str] = (),
) -> Iterator[Arrival]:
    """Requests of ShareGPT's conversations: the first question and answer of each.

    Args:
        path: A JSON array, or lines, of {"conversations": [{"from": "human", "value": question}, {"from": "gpt",
            "value": answer}, ...]}; conversations without an answer are skipped. Without ``from``, the first turn is
            the question.
        times: Times of arrival, which such files do not hold.
        count_tokens: Number of tokens in a text; the default takes four characters for a token.
        ignore_columns: Keys of a conversation or of a turn to leave out.

    Raises:
        ValueError: A line is malformed; the message names it.
    """
    arrival_times = iter(times)
    columns = column_check(ignore_columns)
    for index, (place, line) in enumerate(json_rows(path)):
        line = columns.check(place.removesuffix(":"), line, CONVERSATION_RULES)
        if (texts := first_exchange(place, line.get("conversations"), columns)) is not None:
            lengths = [max(1, count_tokens(text)) for text in texts]
            yield timed_arrival(f"r{index}", [index] * lengths[0], lengths[1], next(arrival_times))
    columns.finish(path)
