"""The laws by name, what each protects, and the exceptions that Workbench takes because vLLM does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class NamedException(NamedTuple):
    """Something that a law forbids and vLLM does. Our own schedules may do it; for any other scheduler it is reported.

    Attributes:
        name: Its name, which ``Broken.exception`` carries.
        law: The law.
        sentence: The behaviour in one sentence.
    """

    name: str
    law: str
    sentence: str


class Law(NamedTuple):
    """One law; `workbench.trace.laws.rules.RULES` has its predicates.

    Attributes:
        name: Its name.
        protects: Its purpose, in one sentence.
    """

    name: str
    protects: str


class Broken(NamedTuple):
    """A law that a step broke.

    Attributes:
        law: The name of the law.
        step: Index of the step.
        request_id: The request concerned; "" for none.
        message: The fault, with the numbers.
        exception: The named exception that allows it in our own schedules; "" for none.
    """

    law: str
    step: int
    request_id: str
    message: str
    exception: str = ""

    def __str__(self) -> str:
        request = f", request {self.request_id!r}" if self.request_id else ""
        allowed = f" (exception {self.exception})" if self.exception else ""
        return f"step {self.step}{request}: {self.law}: {self.message}{allowed}"


class LawError(AssertionError):
    """A checked scheduler broke a law.

    Attributes:
        broken: The broken laws.
    """

    def __init__(self, broken: Sequence[Broken]) -> None:
        super().__init__("\n".join(map(str, broken)))
        self.broken = tuple(broken)


LAWS = (
    Law("crash", "A step completes: no exception ends it or the requests in it."),
    Law("blocks", "KV blocks have one owner or the same content, and none is lost: free and held ones are the pool."),
    Law("content", "A request reads the KV of exactly its tokens, also when it found the block in the prefix cache."),
    Law("counters", "Progress is counted right: no counter is negative, and each equals a recount from the chunks."),
    Law("limits", "No configured limit is exceeded: budget, seats, lengths, caps and partial prefills."),
    Law("exactly_once", "Each request is served once: one queue, one end, and each of its tokens delivered once."),
    Law("order", "Nobody overtakes: requests are admitted, continued and preempted in the order of the policy."),
    Law(
        "utilisation",
        "Nothing lies idle that a request could use: steps, tokens, seats, blocks, drafts and cached prefixes.",
    ),
    Law("progress", "Requests end: a state that repeats without a token delivered proves that they never will."),
)
"""Every law, in the order in which findings of one moment are reported."""

EXCEPTIONS = (
    NamedException(
        "finished_rows_keep_seats",
        "utilisation",
        "With asynchronous scheduling a request keeps its seat until the output of its last step has come in.",
    ),
    NamedException(
        "priority_waits_at_full_seats",
        "order",
        "A waiting request takes no seat from a running one of lower priority.",
    ),
    NamedException(
        "preempted_behind_newcomers",
        "order",
        "With priorities, a preempted request stands behind requests of its priority that arrived earlier and are new.",
    ),
)
"""Every named exception."""
