"""A request as the laws count it from the steps, and its chunks in flight."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple


class Writing:
    """Positions ``[begin, end)`` of a request, written since an admission for one KV cache group.

    Attributes:
        known: The request.
        group: The KV cache group.
        begin: First position.
        num_places: Places of the block table up to which the blocks are noted.
        step: The step in which it began.
        end: One past the last position.
    """

    __slots__ = ("begin", "end", "group", "known", "num_places", "step")

    def __init__(self, known: Known, group: int, begin: int, num_places: int, step: int, end: int = 0) -> None:
        self.known, self.group, self.begin, self.end, self.step = known, group, begin, end, step
        self.num_places = num_places


class Known:
    """A request as counted from the steps.

    Attributes:
        request_id: Its id.
        tokens: Its known tokens; None if they are not recorded.
        num_tokens: Number of known tokens; None if its beginning was not seen.
        num_prompt_tokens: Length of the prompt.
        max_tokens: Maximum number of output tokens.
        priority: Smaller is served first under the "priority" policy.
        arrival_time: Seconds since the start of the trace.
        salt: Only requests with the same salt find each other's blocks in the prefix cache.
        computed: ``num_kv_computed``.
        placeholders: Output tokens that steps in flight will give.
        in_flight: Tokens of its chunks in flight.
        stale: Those of them that were scheduled before its latest preemption.
        generation: Number of preemptions.
        arrival: Place in the order of arrival.
        admission: Place in the order of admission, -1 for one that was never admitted.
        preemption: Place of its latest preemption in the order of all, -1 for one that was never preempted.
        tables: Its block tables, one per KV cache group.
        published: Number of its first blocks that are known to be in the prefix cache, or not to belong there.
        proposed: Number of drafts that its next chunk is to verify.
        long: It had more than the threshold left when it was admitted, or when the step began.
        status: "waiting", "running" or "preempted".
        waited_as: Its place in the order of the waiting queue before it was admitted.
        scheduled_in: The step that scheduled it last, by the history's count; 0 for none.
        hashes: Hashes of its blocks, kept by ``SchedulerState.block_keys``.
        writings: The positions that it has written since its latest admission, for each KV cache group.
        stops: Tokens that end it; None if they are not known.
        feeds: Delivered tokens are added to its tokens; else these are the scheduler's list, which grows without help.
    """

    __slots__ = (
        "admission",
        "arrival",
        "arrival_time",
        "computed",
        "feeds",
        "generation",
        "hashes",
        "in_flight",
        "long",
        "max_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "placeholders",
        "preemption",
        "priority",
        "proposed",
        "published",
        "request_id",
        "scheduled_in",
        "sharing",
        "stale",
        "status",
        "stops",
        "tables",
        "tokens",
        "waited_as",
        "writings",
    )

    def __init__(
        self, request: Any, tokens: list[int] | None, arrival: int, num_groups: int, *, whole: bool, feeds: bool
    ) -> None:
        self.request_id: str = request.request_id
        self.tokens = tokens
        self.num_prompt_tokens: int = request.num_prompt_tokens
        self.num_tokens: int | None = self.num_prompt_tokens if whole else None
        self.max_tokens: int = request.max_tokens
        self.stops: Collection[int] | None = None
        self.priority: int = request.priority
        self.arrival_time: float = request.arrival_time
        self.sharing: tuple[str, str] = (request.cache_salt, getattr(request, "adapter", ""))
        self.computed = self.placeholders = self.in_flight = self.stale = self.generation = self.scheduled_in = 0
        self.published = self.proposed = 0
        self.arrival = arrival
        self.admission = self.preemption = -1
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.long = False
        self.status = "waiting"
        self.waited_as: tuple[Any, ...] = ()
        self.hashes: list[bytes] = []
        self.writings: list[Writing] = []
        self.feeds = feeds

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far; 0 if they are not known."""
        return 0 if self.num_tokens is None else self.num_tokens - self.num_prompt_tokens

    @property
    def num_left(self) -> int:
        """Known and expected tokens that are not computed; 0 if they are not known."""
        return 0 if self.num_tokens is None else self.num_tokens + self.placeholders - self.computed


class Flight(NamedTuple):
    """A chunk in flight: whose it is, its generation, whether it samples, and the tokens it may give."""

    known: Known
    generation: int
    num_tokens: int
    samples: bool
    num_drafts: int


class Findings:
    """Faults found while counting, by the name of the rule that reports them."""

    def __init__(self) -> None:
        self.by_rule: dict[str, list[tuple[str, ...]]] = {}

    def add(self, rule: str, request_id: str, detail: str, exception: str = "") -> None:
        """Note a fault.

        Args:
            rule: Name of the rule that reports it.
            request_id: The request concerned; "" for none.
            detail: The fault, with the numbers.
            exception: The named exception that allows it in our own schedules.
        """
        self.by_rule.setdefault(rule, []).append((request_id, detail, exception))
