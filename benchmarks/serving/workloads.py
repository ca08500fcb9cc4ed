"""The workloads of the serving benchmark: lengths, arrivals and prompts, all from a seed. Standard library only.

Each but sonnet exists in two sizes. The full size has the usual shape of serving benchmarks for GPU machines. The small
size keeps the proportions (input to output, requests to concurrency, chunk to prompt), and takes little time on two
cores.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

MAX_MODEL_LEN = 8192
"""Context of the bundled model: the long prompt and its output together fill it."""

LINES = 518
"""Lines of the generated text of the workload "sonnet", as many as vLLM's sonnet.txt has."""


@dataclass(frozen=True)
class Shape:
    """The shape of a workload, without its prompts.

    Attributes:
        what: A description in one line.
        num_requests: Number of requests.
        input_tokens: Prompt tokens of each request; the total when ``skewed``.
        output_tokens: Output tokens of each request; the total when ``skewed``.
        concurrency: Number of requests that a client keeps open.
        rate: Arrivals per second, Poisson; 0 if all requests arrive at the start.
        token_budget: Maximum number of tokens in a step, for engines with such a limit.
        shared_prefix: Number of prompt tokens that all requests share at the beginning.
        skewed: Lengths are log-normal instead of equal, like those of conversations.
        line_tokens: Prompts are lines of so many tokens, drawn from one text of LINES lines; 0 for random tokens.
    """

    what: str
    num_requests: int
    input_tokens: int
    output_tokens: int
    concurrency: int
    rate: float
    token_budget: int
    shared_prefix: int = 0
    skewed: bool = False
    line_tokens: int = 0


FULL = {
    "random": Shape("100 requests of 1,024 in, 128 out", 100, 1024, 128, 32, 10.0, 512),
    "sonnet": Shape(
        "16 requests of 1,024 in, 128 out", 16, 1024, 128, 16, 10.0, 512, shared_prefix=192, line_tokens=16
    ),
    "sharegpt": Shape(
        "100 requests, 23,260 in and 22,061 out, log-normal", 100, 23_260, 22_061, 32, 10.0, 512, skewed=True
    ),
    "long_prompt": Shape("1 request of 8,182 in, 10 out", 1, MAX_MODEL_LEN - 10, 10, 1, 0.0, 2048),
    "decode_only": Shape("32 requests of 1 in, 256 out", 32, 1, 256, 32, 0.0, 512),
    "prefix_heavy": Shape("64 requests of 1,024 + 128 in, 32 out", 64, 1152, 32, 32, 10.0, 512, shared_prefix=1024),
}
SMALL = {
    "random": Shape("12 requests of 128 in, 16 out", 12, 128, 16, 4, 10.0, 64),
    "sharegpt": Shape("8 requests, 465 in and 441 out, log-normal", 8, 465, 441, 3, 10.0, 64, skewed=True),
    "long_prompt": Shape("1 request of 1,014 in, 10 out", 1, 1014, 10, 1, 0.0, 256),
    "decode_only": Shape("8 requests of 1 in, 64 out", 8, 1, 64, 8, 0.0, 64),
    "prefix_heavy": Shape("12 requests of 256 + 32 in, 8 out", 12, 288, 8, 4, 10.0, 128, shared_prefix=256),
}


@dataclass(frozen=True)
class Request:
    """One request: its arrival in seconds, its prompt, and its number of output tokens."""

    arrival: float
    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True)
class Workload:
    """A shape with its requests, in order of arrival."""

    name: str
    shape: Shape
    requests: list[Request]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, output included."""
        return max(len(request.prompt) + request.output_tokens for request in self.requests)

    def to_dict(self) -> dict[str, Any]:
        """The workload as JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Workload:
        """The inverse of ``to_dict``."""
        requests = [Request(**request) for request in data["requests"]]
        return cls(data["name"], Shape(**data["shape"]), requests)


def make_workload(name: str, shape: Shape, vocabulary: Sequence[int], seed: int = 0) -> Workload:
    """The requests of a workload.

    Args:
        name: The workload's name, which is part of the seed.
        shape: The workload's shape, such as ``FULL[name]``.
        vocabulary: Token ids for prompts.
        seed: Seed for lengths, arrivals and prompts.
    """
    generator = random.Random(f"{name} {seed}")

    def words(count: int) -> list[int]:
        return [generator.choice(vocabulary) for _ in range(count)]

    lines = [words(shape.line_tokens) for _ in range(LINES if shape.line_tokens else 0)]

    def tokens(count: int) -> list[int]:
        if not lines:
            return words(count)
        return [token for _ in range(count // shape.line_tokens) for token in generator.choice(lines)]

    prefix, arrival, requests = tokens(shape.shared_prefix), 0.0, []
    inputs, outputs = (
        _lengths(total, shape, generator) for total in (shape.input_tokens - shape.shared_prefix, shape.output_tokens)
    )
    for num_input, num_output in zip(inputs, outputs, strict=True):
        requests.append(Request(arrival, prefix + tokens(num_input), num_output))
        arrival += generator.expovariate(shape.rate) if shape.rate else 0.0
    return Workload(name, shape, requests)


def _lengths(tokens: int, shape: Shape, generator: random.Random) -> list[int]:
    """One length per request: ``tokens`` each, or log-normal lengths (sigma 1) that add up to ``tokens``."""
    if not shape.skewed:
        return [tokens] * shape.num_requests
    weights = [generator.lognormvariate(0.0, 1.0) for _ in range(shape.num_requests)]
    spare = tokens - 4 * shape.num_requests  # minimum length 4
    lengths = [4 + int(spare * weight / sum(weights)) for weight in weights]
    for index in range(tokens - sum(lengths)):
        lengths[index % len(lengths)] += 1
    return lengths
