"""The requests of a benchmark, by the rules of ``vllm bench serve``: random tokens, sonnet's lines, ShareGPT's turns.

Files are the user's own. Sonnet is a text of which each line is drawn (vLLM distributed
one up to 2025); ShareGPT is a JSON list of ``{"conversations": [{"value": TEXT}, ...]}``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base.field_checks import json_object
from workbench.base.outside_files import read_json, read_text

SONNET_PREFIX = 200
"""Tokens that sonnet's prompts share at their beginning, unless they are shorter: vLLM's default."""

MIN_TOKENS, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048
"""Conversations of ShareGPT that vLLM takes: at least 4 tokens each, at most 1,024 in, and 2,048 in and out."""

Encode = Callable[[str], Sequence[int]]
"""The token ids of a text."""

_MAX_DATASET = 2**32
"""Bytes of the largest file of conversations (4 GiB); the usual one has 600 MB."""


@dataclass(frozen=True)
class BenchRequest:
    """A request of a benchmark.

    Attributes:
        prompt: Token ids.
        output_len: Output tokens.
    """

    prompt: Sequence[int]
    output_len: int

    @property
    def num_tokens(self) -> int:
        """Tokens in and out."""
        return len(self.prompt) + self.output_len


def random_requests(count: int, input_len: int, output_len: int, vocab_size: int, seed: int) -> list[BenchRequest]:
    """Requests of one length whose tokens are random."""
    rng = random.Random(seed)
    prompts = ([rng.randrange(vocab_size) for _ in range(input_len)] for _ in range(count))
    return [BenchRequest(prompt, output_len) for prompt in prompts]


def sonnet_requests(
    path: Path, encode: Encode, count: int, input_len: int, output_len: int, seed: int
) -> list[BenchRequest]:
    """Requests made of lines of a text, the first of them the same in each.

    Args:
        path: The text.
        encode: Gives the token ids of a text.
        count: Number of requests.
        input_len: Maximum number of prompt tokens: as many lines as fit, so a few fewer.
        output_len: Output tokens.
        seed: Seed of the drawn lines.

    Raises:
        ValueError: The file has no lines, or no line fits into a prompt.
        OSError: The file cannot be read.
    """
    lines = [tuple(encode(f"{line}\n")) for line in read_text(path).splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"--dataset-path {path} has no line of text; sonnet needs some")
    shortest = sorted(lines, key=len)[0]
    if len(shortest) > input_len:
        needed = f"the shortest line of {path} has {len(shortest)} tokens"
        raise ValueError(f"--input-len is {input_len} and {needed}; raise it")
    rng = random.Random(seed)
    shared: list[int] = []
    for line in lines:
        if len(shared) + len(line) > min(SONNET_PREFIX, input_len):
            break
        shared += line
    requests = []
    for _ in range(count):
        prompt = list(shared)
        while len(line := rng.choice(lines)) + len(prompt) <= input_len:
            prompt += line
        requests.append(BenchRequest(prompt or list(shortest), output_len))
    return requests


def sharegpt_requests(path: Path, encode: Encode, count: int, seed: int) -> list[BenchRequest]:
    """The first turns of conversations: the question is the prompt, and the answer's length is the output's.

    Args:
        path: The file, whole or a part of it.
        encode: Gives the token ids of a text.
        count: Number of requests; fewer if the file has fewer.
        seed: Seed of the order.

    Raises:
        ValueError: The file has another format, or none of its conversations has a usual length.
        OSError: The file cannot be read.
    """
    try:
        entries = read_json(path, _MAX_DATASET)
        pairs = [
            (turns[0]["value"], turns[1]["value"])
            for entry in entries
            if len(turns := json_object("an entry", entry).get("conversations", ())) >= 2
        ]
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise TypeError("a text is not a string")
    except (ValueError, TypeError, KeyError) as error:
        example = '[{"conversations": [{"value": "question"}, {"value": "answer"}]}]'
        raise ValueError(f"--dataset-path {path} is not ShareGPT's format, {example}: {error}") from error
    random.Random(seed).shuffle(pairs)
    requests: list[BenchRequest] = []
    for question, answer in pairs:
        request = BenchRequest(encode(question), len(encode(answer)))
        long_enough = min(len(request.prompt), request.output_len) >= MIN_TOKENS
        if long_enough and len(request.prompt) <= MAX_PROMPT and request.num_tokens <= MAX_TOTAL:
            requests.append(request)
        if len(requests) == count:
            break
    if not requests:
        raise ValueError(
            f"--dataset-path {path} has no conversation of {MIN_TOKENS} to {MAX_PROMPT} prompt tokens and at most "
            f"{MAX_TOTAL} in all, which is what the benchmark takes"
        )
    return requests
