"""The laws' predicates: one list, over a scheduler's state and over the steps of a run.

A predicate looks at one moment, after scheduling or after the output of a step has been taken in, and yields what is
wrong. Those that need a state (`SchedulerState`) pass over a trace, which has none: there the same numbers are counted
from the records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from typing import Literal, NamedTuple

from workbench.laws import service
from workbench.laws.moment import Findings, Moment
from workbench.laws.state import SchedulerState


class Rule(NamedTuple):
    """One predicate of a law.

    Attributes:
        law: The law's name.
        predicate: Yields what is wrong at a moment.
        message: The rule in a few words; what the predicate yields follows it.
        when: The moment that it looks at: after scheduling, after the output has come in, or both.
    """

    law: str
    predicate: Callable[[Moment], Findings]
    message: str
    when: Literal["scheduled", "updated", "both"] = "both"


def _counted(name: str) -> Callable[[Moment], Findings]:
    """The faults that the history found while counting."""
    return lambda moment: iter(moment.history.found.get(name, ()))


# -- blocks ----------------------------------------------------------------------------------------------------


def _references(moment: Moment) -> Findings:
    if (state := moment.state) is None:
        return
    held = Counter(block for request in state.requests.values() for table in request.block_tables for block in table)
    if held.pop(0, 0) and moment.limits.is_plain:
        yield "", "block 0 is handed out"
    free = state.free_blocks
    if both := [block for block in held if block in free]:
        yield _holder(state, both[0]), f"block {both[0]} is held and free"
    if len(free) + len(held) != state.num_blocks - 1 or 0 in free:
        yield "", f"{len(free)} are free and {len(held)} held of {state.num_blocks - 1}"
    counts = state.ref_counts or ()
    if counts and (len(held) != len(counts) - counts.count(0) or any(counts[b] != n for b, n in held.items())):
        block = next(block for block, count in enumerate(counts) if count != held[block])
        yield _holder(state, block), f"block {block} counts {counts[block]} references, {held[block]} tables hold it"
    if state.cached_blocks is not None and len(held) != held.total():
        for block, count in held.items():
            if count > 1 and block not in state.cached_blocks:
                yield _holder(state, block), f"block {block} is shared and is not in the prefix cache"
                return


def _holder(state: SchedulerState, block: int) -> str:
    return next((name for name, r in state.requests.items() for table in r.block_tables if block in table), "")


def _prefix_cache_agrees(moment: Moment) -> Findings:
    state = moment.state
    if state is None or state.blocks_by_hash is None or state.cached_blocks is None:
        return
    found = {block: digest for digest, blocks in state.blocks_by_hash.items() for block in blocks}
    if found != state.cached_blocks:
        block = next(iter(found.items() ^ state.cached_blocks.items()))[0]
        yield "", f"block {block} is found by another hash than the one it has"


def _tables_fit(moment: Moment) -> Findings:
    if (state := moment.state) is None:
        return
    exact = moment.limits.is_plain and not moment.limits.num_drafts and not moment.limits.asynchronous
    size = moment.limits.groups[0].block_size
    for request in state.requests.values():
        if exact:
            needed, held = -(-request.num_kv_computed // size), len(request.block_tables[0])
            if needed != held:
                yield request.request_id, f"it holds {held} blocks for {request.num_kv_computed} tokens, not {needed}"
        elif request.status != "running" and any(request.block_tables):
            yield request.request_id, "it waits and holds blocks"


def _places(moment: Moment) -> Findings:
    missing, moment.history.contents.missing = moment.history.contents.missing, []
    return iter(missing)


def _free_and_held(moment: Moment) -> Findings:
    """In a trace: the recorded number of free blocks is that of the pool less the blocks in tables."""
    history, step = moment.history, moment.step
    if moment.state is not None or history.num_usable_blocks is None:
        return
    free = step.free_blocks if moment.scheduled else step.free_blocks_end
    expected = history.num_usable_blocks - history.num_held()
    if not moment.scheduled and free != expected:  # requests aborted in the meantime have given theirs back
        expected = history.num_usable_blocks - history.num_held(without=moment.next_aborted)
    if free != expected:
        yield "", f"{free} are free, {history.num_usable_blocks - expected} of {history.num_usable_blocks} are held"


# -- content ---------------------------------------------------------------------------------------------------


def _contents(moment: Moment) -> Findings:
    contents, state = moment.history.contents, moment.state
    if state is not None and state.cached_blocks is not None:
        contents.check_hashes(state.cached_blocks, state.block_keys)
    elif state is None and not moment.scheduled:
        contents.publish(moment.step.cached_block_ids)
    found, contents.found = contents.found, []
    return iter(found)


# -- counters --------------------------------------------------------------------------------------------------


def _not_negative(moment: Moment) -> Findings:
    for chunk in moment.step.chunks:
        if chunk.num_tokens < 1:
            yield chunk.request_id, f"its chunk has {chunk.num_tokens} tokens"
    for request in moment.state.requests.values() if moment.state is not None else ():
        for name in _COUNTERS:
            if (value := getattr(request, name)) < 0:
                yield request.request_id, f"{name} is {value}"


_COUNTERS = ("num_kv_computed", "num_output_placeholders", "num_in_flight_tokens", "num_stale_output_tokens")


def _recounted(moment: Moment) -> Findings:
    if (state := moment.state) is None:
        return
    known, is_async = moment.history.requests, moment.limits.asynchronous
    for request_id, request in state.requests.items():
        if (mine := known.get(request_id)) is None or mine.num_tokens is None:
            continue
        if request.num_kv_computed != mine.computed:
            yield request_id, f"num_kv_computed is {request.num_kv_computed}, its chunks make {mine.computed}"
        if not is_async:
            continue
        if request.num_output_placeholders != mine.placeholders:
            yield request_id, f"num_output_placeholders is {request.num_output_placeholders}, not {mine.placeholders}"
        if request.num_in_flight_tokens != mine.in_flight:
            yield request_id, f"num_in_flight_tokens is {request.num_in_flight_tokens}, not {mine.in_flight}"
        if request.num_stale_output_tokens != mine.stale:
            yield request_id, f"num_stale_output_tokens is {request.num_stale_output_tokens}, not {mine.stale}"


# -- limits ----------------------------------------------------------------------------------------------------


def _budget(moment: Moment) -> Findings:
    num_tokens = sum(chunk.num_tokens for chunk in moment.step.chunks)
    limit = min(moment.limits.token_budget or num_tokens, moment.step.token_budget or num_tokens)
    if num_tokens > limit:
        yield "", f"{num_tokens} tokens are scheduled, the budget is {limit}"


def _seats(moment: Moment) -> Findings:
    limit, running = moment.limits.max_running, moment.step.running
    if limit is not None and len(running) > limit and (moment.step.admitted or moment.step.resumed):
        yield running[-1], f"{len(running)} requests run, {limit} may"


def _lengths(moment: Moment) -> Findings:
    limit = moment.limits.max_model_len
    for chunk in moment.step.chunks:
        known = moment.history.requests.get(chunk.request_id)
        if known is None or known.num_tokens is None:
            continue
        if limit is not None and max(known.computed, known.num_tokens) > max(limit, known.num_prompt_tokens):
            yield known.request_id, f"it has {max(known.computed, known.num_tokens)} tokens, max_model_len is {limit}"
        if known.num_output_tokens > known.request.max_tokens:
            yield known.request_id, f"it has {known.num_output_tokens} tokens, max_tokens is {known.request.max_tokens}"


def _caps(moment: Moment) -> Findings:
    cap = moment.step.long_prefill_cap
    if not cap:
        return
    for chunk in moment.step.chunks:
        if chunk.num_tokens > cap:
            yield chunk.request_id, f"its chunk has {chunk.num_tokens} tokens, long_prefill_token_threshold is {cap}"


def _watermark(moment: Moment) -> Findings:
    step, kept = moment.step, moment.limits.num_watermark_blocks
    if not kept or not moment.limits.is_plain or moment.limits.has_own_order:
        return
    if (step.admitted or step.resumed) and len(step.running) > 1 and step.free_blocks < kept:
        yield (*step.admitted, *step.resumed)[-1], f"{step.free_blocks} blocks are free, the watermark is {kept}"


def _partial_prefills(moment: Moment) -> Findings:
    limits, step = moment.limits, moment.step
    for chunk in () if limits.chunked_prefill else step.chunks:
        if chunk.is_partial_prefill:
            yield chunk.request_id, "its prompt is split, enable_chunked_prefill is off"
    new = {*step.admitted, *step.resumed}
    if not new or limits.has_policy or limits.max_partial_prefills is None is limits.max_long_partial_prefills:
        return
    partial = [known for known in moment.history.running if known.num_left > 0 or known.num_tokens is None]
    long = [known for known in partial if known.long]
    for prompts, most, kind in (
        (partial, limits.max_partial_prefills, "prompts"),
        (long, limits.max_long_partial_prefills, "long prompts"),
    ):
        newest = next((known.request_id for known in reversed(prompts) if known.request_id in new), None)
        if most is not None and newest is not None and len(prompts) > most:
            yield newest, f"{len(prompts)} {kind} are in progress, {most} may be"


# -- exactly once ----------------------------------------------------------------------------------------------


def _one_queue(moment: Moment) -> Findings:
    """Every unfinished request waits or runs, and not both."""
    names: list[str]
    unfinished: Set[str]
    if (state := moment.state) is None:
        if not moment.scheduled:
            return
        names, unfinished = [*moment.step.running, *moment.step.waiting], moment.history.requests.keys()
    else:
        names, unfinished = [request.request_id for request in (*state.running, *state.waiting)], state.requests.keys()
        for request in state.running:
            if request.status != "running":
                yield request.request_id, f"it is on the running list and its status is {request.status!r}"
        for request in state.waiting:
            if request.status == "running":
                yield request.request_id, "it waits and its status is 'running'"
    if len(names) == len(unfinished) and unfinished == set(names):
        return
    for name, count in Counter(names).items():
        if count > 1:
            yield name, "it is queued twice"
        elif name not in unfinished:
            yield name, "it is queued, and has ended or never arrived"
    for name in unfinished - set(names):  # a recording may name the head of its queue only
        if state is not None or moment.history.requests[name].status == "running" or moment.history.whole_queue:
            yield name, "it is in no queue"


def _tokens_delivered(moment: Moment) -> Findings:
    for request_id, request in moment.state.requests.items() if moment.state is not None else ():
        known = moment.history.requests.get(request_id)
        if known is not None and known.num_tokens is not None and len(request.token_ids) != known.num_tokens:
            num_output = len(request.token_ids) - known.num_prompt_tokens
            yield request_id, f"it has {num_output} output tokens, {known.num_output_tokens} were delivered"


RULES = (
    Rule("blocks", _references, "counts, tables and free queue disagree"),
    Rule("blocks", _free_and_held, "free and held blocks are not the pool"),
    Rule("blocks", _tables_fit, "a request holds other blocks than it needs"),
    Rule("blocks", _places, "a row has no block"),
    Rule("blocks", _prefix_cache_agrees, "the two sides of the prefix cache disagree"),
    Rule("content", _contents, "a block holds something else than it is used for"),
    Rule("counters", _not_negative, "a number is out of its range", "scheduled"),
    Rule("counters", _counted("begins_at_computed"), "a chunk does not continue the one before it", "scheduled"),
    Rule("counters", _recounted, "a counter differs from its recount"),
    Rule("limits", _budget, "the token budget is exceeded", "scheduled"),
    Rule("limits", _seats, "too many requests run", "scheduled"),
    Rule("limits", _lengths, "a request is too long", "updated"),
    Rule("limits", _caps, "a chunk is too long", "scheduled"),
    Rule("limits", _watermark, "an admission uses blocks that are kept free", "scheduled"),
    Rule("limits", _partial_prefills, "too many prompts are in progress", "scheduled"),
    Rule("exactly_once", _one_queue, "a request is lost or queued twice"),
    Rule("exactly_once", _counted("scheduled_once"), "a request is scheduled out of turn", "scheduled"),
    Rule("exactly_once", _counted("samples_last"), "a token is sampled from the wrong row", "scheduled"),
    Rule("exactly_once", _counted("delivered_once"), "a token is lost or delivered twice", "updated"),
    Rule("exactly_once", _counted("ends_once"), "a request begins or ends twice"),
    Rule("exactly_once", _tokens_delivered, "a request has other tokens than it was given"),
    Rule("order", service.queue_order, "the queue is out of order", "scheduled"),
    Rule("order", service.overtaking, "a request is overtaken", "scheduled"),
    Rule("order", service.skipped, "a running request is skipped", "scheduled"),
    Rule("order", service.victims, "the wrong request is preempted", "scheduled"),
    Rule("order", service.inversion, "a lower priority keeps the seat", "scheduled"),
    Rule("utilisation", service.empty_step, "a step is wasted", "scheduled"),
    Rule("progress", service.livelock, "the state repeats", "scheduled"),
)
"""Every predicate, in the order of the laws."""
