"""Where the requests of a simulation come from: arrival processes, length distributions and recorded workloads.

Everything here is an iterator, so that a million requests take no more memory than those that are under way. Prompts
are made of numbers that are equal exactly where prompts share a prefix; nothing else matters without a model.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import Any

from workbench.engine.config import SamplingParams
from workbench.engine.field_checks import integer, number
from workbench.engine.workload import MAX_PROMPT_TOKENS, Arrival

Lengths = Callable[[random.Random], int]
"""Draws a number of tokens."""

MOONCAKE_BLOCK = 512
"""Tokens that one ``hash_id`` of a Mooncake trace stands for."""


@lru_cache(maxsize=4096)
def _limit(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def timed_arrival(request_id: str, prompt: Sequence[int], max_tokens: int, at: float, *, priority: int = 0) -> Arrival:
    """A request that arrives at a time rather than before a step.

    Args:
        request_id: Unique name.
        prompt: Token ids.
        max_tokens: Output tokens.
        at: Seconds since the start.
        priority: Smaller is served first under the "priority" policy.
    """
    return Arrival(request_id, prompt, _limit(max_tokens), priority=priority, arrival_time=at, arrives_at=at)


# -- arrival processes: seconds since the start, in order ----------------------------------------------------------


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Independent arrivals, ``rate`` per second on average."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def bursts(rate: float, size: int, rng: random.Random) -> Iterator[float]:
    """``size`` requests at a time, at independent moments, ``rate`` requests per second on average."""
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
        place: Where the description stands, for messages.
        spec: A number of tokens; ``{"choices": [[weight, tokens], ...]}``; ``{"uniform": [low, high]}``; or
            ``{"lognormal": {"median": m, "sigma": s, "min": low, "max": high}}``, as lengths of real prompts are.

    Raises:
        ValueError: None of these, or a value outside its range.
    """
    if isinstance(spec, Mapping) and len(spec) == 1:
        ((kind, value),) = spec.items()
        if kind == "choices" and isinstance(value, Sequence) and value:
            weights = [number(f"{place}.choices weight", pair[0], 0.0) for pair in value]
            tokens = [integer(f"{place}.choices tokens", pair[1], 1, MAX_PROMPT_TOKENS) for pair in value]
            return lambda rng: rng.choices(tokens, weights)[0]
        if kind == "uniform" and isinstance(value, Sequence) and len(value) == 2:
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
        f'{{"lognormal": {{"median", "sigma", "min", "max"}}}}, got {spec!r}'
    )


def generate(
    num_requests: int, times: Iterable[float], prompt: Lengths, output: Lengths, rng: random.Random
) -> Iterator[Arrival]:
    """Requests of drawn lengths that share no prefix.

    Args:
        num_requests: How many.
        times: When they arrive, in order; one of the arrival processes.
        prompt: Prompt lengths.
        output: Output lengths.
        rng: Source of the lengths.
    """
    for index, at in zip(range(num_requests), times):
        yield timed_arrival(f"r{index}", [index] * prompt(rng), output(rng), at)


def read_generated(spec: Mapping[str, Any]) -> Iterator[Arrival]:
    """Requests from a description, as a workload file's ``"generate"`` holds it.

        {"num_requests": 1000, "seed": 0, "prompt": 500, "output": {"uniform": [1, 128]},
         "arrivals": {"process": "poisson", "rate": 12.5}}

    ``process`` is "poisson", "bursts" (with "size"), "evenly", or "at_once".

    Raises:
        ValueError: The description is malformed; the message names the place.
    """
    known = {"num_requests", "seed", "prompt", "output", "arrivals"}
    if not isinstance(spec, Mapping) or set(spec) - known:
        raise ValueError(f"generate must be an object with {', '.join(sorted(known))}, got {spec!r}")
    seed = integer("generate.seed", spec.get("seed", 0), 0)
    num_requests = integer("generate.num_requests", spec.get("num_requests"), 1)
    prompt = read_lengths("generate.prompt", spec.get("prompt"))
    output = read_lengths("generate.output", spec.get("output"))
    times = _read_process(spec.get("arrivals") or {"process": "at_once"}, random.Random(f"arrivals {seed}"))
    return generate(num_requests, times, prompt, output, random.Random(f"lengths {seed}"))


def _read_process(spec: Any, rng: random.Random) -> Iterator[float]:
    if not isinstance(spec, Mapping) or set(spec) - {"process", "rate", "size"}:
        raise ValueError(f"generate.arrivals must be an object with process, rate and size, got {spec!r}")
    process = spec.get("process")
    if process == "at_once":
        return repeat(0.0)
    if process not in ("poisson", "bursts", "evenly"):
        raise ValueError(
            f'generate.arrivals.process must be "poisson", "bursts", "evenly" or "at_once", got {process!r}'
        )
    rate = number("generate.arrivals.rate", spec.get("rate"), 0.0, low_open=True)
    if process == "poisson":
        return poisson(rate, rng)
    if process == "evenly":
        return evenly(rate)
    return bursts(rate, integer("generate.arrivals.size", spec.get("size"), 1), rng)


# -- recorded workloads ------------------------------------------------------------------------------------------------


def read_mooncake(path: str | os.PathLike[str], *, speed: float = 1.0) -> Iterator[Arrival]:
    """Requests of a Mooncake-style trace: JSONL with timestamp (ms), input_length, output_length and hash_ids.

    Two prompts share a prefix as far as their ``hash_ids`` agree; each stands for 512 tokens.

    Args:
        path: The file; its lines are in order of time.
        speed: Play the trace this many times as fast.

    Raises:
        ValueError: A line is malformed; the message names it.
    """
    for index, line in enumerate(_json_lines(path)):
        place = f"{path}, line {index + 1}: "
        length = integer(f"{place}input_length", line.get("input_length"), 1, MAX_PROMPT_TOKENS)
        output = integer(f"{place}output_length", line.get("output_length"), 0)
        at = number(f"{place}timestamp", line.get("timestamp", 0), 0.0) / 1000 / speed
        prompt: list[int] = []
        for hash_id in line.get("hash_ids") or ():
            prompt += [integer(f"{place}hash_ids", hash_id, 0)] * MOONCAKE_BLOCK
        prompt = (prompt + [-1 - index] * max(0, length - len(prompt)))[:length]
        yield timed_arrival(f"r{index}", prompt, max(1, output), at)


def _quarter_of_characters(text: str) -> int:
    return max(1, len(text) // 4)


def read_sharegpt(
    path: str | os.PathLike[str],
    times: Iterable[float],
    *,
    count_tokens: Callable[[str], int] = _quarter_of_characters,
) -> Iterator[Arrival]:
    """Requests of a ShareGPT-like JSONL file: the first question and answer of each conversation.

    Args:
        path: Lines of {"conversations": [{"value": question}, {"value": answer}, ...]}; shorter ones are skipped.
        times: When they arrive: such files hold no times.
        count_tokens: Tokens of a text; without a tokenizer, four characters are taken for a token.

    Raises:
        ValueError: A line is malformed; the message names it.
    """
    moments = iter(times)
    for index, line in enumerate(_json_lines(path)):
        turns = line.get("conversations")
        if not isinstance(turns, list):
            raise ValueError(f"{path}, line {index + 1}: conversations must be a list, got {turns!r}")
        texts = [str(turn.get("value", "")) for turn in turns[:2] if isinstance(turn, Mapping)]
        if len(texts) == 2 and all(texts):
            lengths = [max(1, count_tokens(text)) for text in texts]
            yield timed_arrival(f"r{index}", [index] * lengths[0], lengths[1], next(moments))


def _json_lines(path: str | os.PathLike[str]) -> Iterator[Mapping[str, Any]]:
    with Path(path).open(encoding="utf-8") as file:
        for number_, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError) as problem:
                raise ValueError(f"{path}, line {number_}: not JSON: {problem}") from None
            if not isinstance(line, dict):
                raise ValueError(f"{path}, line {number_}: must be an object, got {line!r}")
            yield line
