"""Limits on a simulation: a misplaced digit in a workload should not fill the memory or run for days."""

from __future__ import annotations

from collections.abc import Iterable

MAX_PROMPT_TOKENS = 10_000_000
"""Maximum length of a prompt."""

MAX_WORKLOAD_TOKENS = 2**25
"""Maximum number of prompt tokens that are in memory together (33.5 million, about 1.2 GiB)."""

MAX_NESTING = 8
"""Maximum depth of parts within parts of a prompt."""

MAX_REQUESTS = 1_000_000
"""Maximum number of requests of a simulation that keeps every step."""

MAX_STEPS = 100_000
"""Default maximum number of steps of a simulation that keeps every step."""


def count_prompt_tokens(lengths: Iterable[int], what: str) -> int:
    """Add up the lengths of prompts that will be in memory together, before any of them is made.

    Args:
        lengths: The length of each prompt.
        what: The place that they come from, such as a file.

    Raises:
        ValueError: They have more than MAX_WORKLOAD_TOKENS tokens.
    """
    total = 0
    for length in lengths:
        total += length
    if total > MAX_WORKLOAD_TOKENS:
        raise ValueError(
            f"{what}: the prompts of all requests have {total} tokens, allowed are {MAX_WORKLOAD_TOKENS}: take fewer "
            "requests, or describe them under generate of a workload, which makes them one by one"
        )
    return total
