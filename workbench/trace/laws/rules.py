"""The rules of every law, as one list.

A rule is a predicate, which looks at a step after scheduling and notes what is wrong, or the name of a fault that is
noted while the steps are counted (`history.py`, `tables.py`, `contents.py`) or compared with the scheduler's books
(`books.py`): counting and comparing pass once over a step for all of these rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from workbench.trace.laws import service
from workbench.trace.laws.history import History
from workbench.trace.laws.state import Limits, Step


class Rule(NamedTuple):
    """One rule of a law.

    Attributes:
        law: The law's name.
        predicate: Notes what is wrong in a step; or the name of a fault that is noted while counting.
        message: The fault in a few words; its details follow it.
        applies: Whether the rule says something under these limits.
    """

    law: str
    predicate: Callable[[History, Step], None] | str
    message: str
    applies: Callable[[Limits], bool] = lambda limits: True

    @property
    def name(self) -> str:
        """Its name, under which its faults are noted."""
        return self.predicate if isinstance(self.predicate, str) else self.predicate.__name__


def _shares(limits: Limits) -> bool:
    """Whether prompts in progress share the budget, and nothing else decides the length of chunks."""
    return limits.max_partial_prefills is not None and not (limits.has_policy or limits.asynchronous)


def _shares_tokens(limits: Limits) -> bool:
    """Whether these shares are also not cut by states of recurrent layers, nor lengthened by drafts."""
    return _shares(limits) and not limits.caches_states and limits.num_drafts == 0


def _vllms_order(limits: Limits) -> bool:
    return not limits.has_own_order


RULES = (
    Rule("blocks", "references", "counts, tables and free queue disagree"),
    Rule("blocks", "free_and_held", "free and held blocks are not the pool"),
    Rule("blocks", "taken", "a block has two owners"),
    Rule("blocks", "given_back", "blocks given back are not those that were held"),
    Rule("blocks", "evicted", "a block loses its content without need"),
    Rule("blocks", "tables_fit", "a request holds other blocks than it needs"),
    Rule("blocks", "places", "a row has no block"),
    Rule("blocks", "prefix_cache", "the two sides of the prefix cache disagree"),
    Rule("content", "contents", "a block holds something else than it is used for"),
    Rule("counters", "not_negative", "a number is out of its range"),
    Rule("counters", "begins_at_computed", "a chunk does not continue the one before it"),
    Rule("counters", "recounted", "a counter differs from its recount"),
    Rule("limits", "budget", "the token budget is exceeded"),
    Rule("limits", service.seats, "too many requests run"),
    Rule("limits", "length", "a request is too long"),
    Rule("limits", "cap", "a chunk is too long"),
    Rule(
        "limits",
        service.watermark,
        "an admission uses blocks that are kept free",
        lambda limits: limits.num_watermark_blocks > 0 and limits.is_plain and not limits.has_own_order,
    ),
    Rule(
        "limits",
        service.whole_prompts,
        "a prompt is split",
        # Chunks that end at a state of recurrent layers split prompts, as in vLLM.
        lambda limits: not limits.chunked_prefill and not limits.caches_states,
    ),
    Rule(
        "limits",
        service.partial_prefills,
        "too many prompts are in progress",
        lambda limits: (
            not (limits.has_policy or limits.max_partial_prefills is limits.max_long_partial_prefills is None)
        ),
    ),
    Rule("exactly_once", "one_queue", "a request is lost or queued twice"),
    Rule("exactly_once", "scheduled_once", "a request is scheduled out of turn"),
    Rule("exactly_once", "samples_last", "a token is sampled from the wrong row"),
    Rule("exactly_once", "delivered_once", "a token is lost or delivered twice"),
    Rule("exactly_once", "ends_once", "a request begins or ends twice"),
    Rule("exactly_once", "tokens_delivered", "a request has other tokens than it was given"),
    Rule("order", service.queue_order, "the queue is out of order"),
    Rule("order", service.overtaking, "a request is overtaken", _vllms_order),
    Rule(
        "order",
        service.skipped,
        "a running request is skipped",
        lambda limits: not (limits.has_own_order or limits.caches_states),
    ),
    Rule(
        "order",
        service.starved,
        "a prompt in progress gets nothing",
        _shares_tokens,
    ),
    Rule("order", service.victims, "the wrong request is preempted", lambda limits: not limits.has_policy),
    Rule("order", service.inversion, "a lower priority keeps the seat", lambda limits: limits.policy == "priority"),
    Rule("utilisation", service.empty_step, "a step is wasted", lambda limits: not limits.has_policy),
    Rule("utilisation", service.cut_short, "a chunk is cut without need", _vllms_order),
    Rule("utilisation", service.left_out, "a request waits without need", _vllms_order),
    Rule("utilisation", service.needless, "blocks are taken without need"),
    Rule("utilisation", "published", "a full block cannot be found"),
    Rule("utilisation", "kept", "a prompt cannot be found again"),
    Rule("utilisation", "found", "a cached prefix is not used"),
    Rule(
        "utilisation",
        service.kept_out,
        "a prompt takes the share of another",
        _shares_tokens,
    ),
    Rule(
        "utilisation",
        service.cut,
        "a part of the budget is wasted",
        lambda limits: _shares(limits) and limits.is_plain and limits.num_drafts == 0,
    ),
    Rule("progress", service.livelock, "the state repeats", lambda limits: not limits.has_policy),
)
"""Every rule, in the order of the laws."""
