"""Limits on a simulation: a misplaced digit in a workload should not fill the memory or run for days."""

from __future__ import annotations

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
