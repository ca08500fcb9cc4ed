"""A scheduler's books compared with the recount: its block tables, its pool, its prefix cache and its counters.

The changes of a step are compared after it; everything is compared every few steps, and when no request is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from workbench.base.text import counted
from workbench.trace.laws.history import History
from workbench.trace.laws.known import Known
from workbench.trace.laws.state import RequestState, SchedulerState, Step

STEPS_BETWEEN_RECOUNTS = 8
"""Steps from one comparison of the whole pool to the next."""


Moment = Literal["scheduled", "updated", "step", "rest"]
"""After scheduling, after an output has come in, after a whole step, or between steps."""


def compare(history: History, state: SchedulerState, moment: Moment, *, names_changes: bool = True) -> None:
    """Note the differences between a scheduler's state and the history.

    Block tables change when a step is scheduled, and are compared then; the counters of requests are compared at its
    end.

    Args:
        history: The run so far.
        state: The state.
        moment: The moment; "rest" compares also what the step did not change.
        names_changes: The steps name the changes of block tables.
    """
    if moment != "updated":
        _compare_tables(history, state, names_changes=names_changes)
    rest = moment == "rest" or not history.requests or history.num_steps % STEPS_BETWEEN_RECOUNTS == 0
    _compare_pool(history, state, everything=rest)
    if state.cached_blocks is not None:
        history.contents.check_hashes(state.cached_blocks, state.blocks_by_hash, state.block_keys)
    if moment != "scheduled" and state.requests is not None:
        _compare_requests(history, state)


def compare_record(history: History, step: Step, *, end: bool) -> None:
    """Note the differences between the numbers of a step and the history.

    Args:
        history: The run so far.
        step: The step.
        end: The numbers are those at its end, else those after scheduling.
    """
    if history.num_usable_blocks is not None:
        free, num_usable = step.free_blocks_end if end else step.free_blocks, history.num_usable_blocks
        if free != num_usable - len(history.tables.held):
            # Requests aborted in the meantime may have given theirs back.
            num_held = history.num_held(without=history.next_aborted if end else ())
            if free != num_usable - num_held:
                history.report("free_and_held", "", f"{free} are free, {num_held} of {num_usable} are held")
    if end:
        history.contents.publish(step.cached_block_ids)


def _compare_tables(history: History, state: SchedulerState, *, names_changes: bool) -> None:
    tables, num_seen = state.tables, 0
    for name, known in history.requests.items():
        if (its := tables.get(name)) is None:
            if any(known.tables):
                history.report("tables_fit", name, f"it holds no blocks, its steps give it {known.tables}")
            continue
        num_seen += 1
        if its == known.tables or not (any(its) or any(known.tables)):
            continue
        if not names_changes and known.status == "running":
            history.tables.follow(known, its)
        else:
            what = f"its block tables are {its}, its steps make them {known.tables}"
            history.report("tables_fit", name, what)
    if num_seen != len(tables):
        for name in tables.keys() - history.requests.keys():
            history.report("tables_fit", name, "it holds blocks, and has ended or never arrived")


def _compare_pool(history: History, state: SchedulerState, *, everything: bool) -> None:
    held, free, counts = history.tables.held, state.free_blocks, state.ref_counts
    num_usable, num_free = state.num_blocks - 1, free if isinstance(free, int) else len(free)
    if num_free + len(held) != num_usable:
        history.report("references", "", f"{num_free} are free and {len(held)} held of {num_usable}")
    elif not isinstance(free, int) and (0 in free or not held.keys().isdisjoint(free)):
        block = 0 if 0 in free else next(block for block in held if block in free)
        what = "free" if block == 0 else "held and free"
        history.report("references", _holder(history, block), f"block {block} is {what}")
    cached = state.cached_blocks
    for block in _to_recount(state, held) if everything else history.tables.touched:
        count = held.get(block, 0)
        if counts and counts[block] != count:
            what = f"block {block} counts {counted(counts[block], 'reference')}, held by {counted(count, 'table')}"
        elif count > 1 and cached is not None and block not in cached:
            what = f"block {block} is shared and is not in the prefix cache"
        else:
            continue
        history.report("references", _holder(history, block), what)
        break
    if everything and state.blocks_by_hash is not None and cached is not None:
        found = {block: digest for digest, blocks in state.blocks_by_hash.items() for block in blocks}
        if found != cached:
            block = next(iter(found.items() ^ cached.items()))[0]
            history.report("prefix_cache", "", f"block {block} is found by another hash than the one it has")


def _to_recount(state: SchedulerState, held: Mapping[int, int]) -> Iterable[int]:
    """The blocks whose references have to be looked at one by one: none that are held by nobody and counted so."""
    counts = state.ref_counts
    if not counts or len(counts) - counts.count(0) == len(held):
        return held
    return range(len(counts))


def _holder(history: History, block: int) -> str:
    return next((name for name, known in history.requests.items() for table in known.tables if block in table), "")


def _compare_requests(history: History, state: SchedulerState) -> None:
    requests, is_async = state.requests or {}, history.limits.asynchronous
    for name, known in history.requests.items():
        if (request := requests.get(name)) is None or known.num_tokens is None:
            continue
        if (
            request.num_kv_computed != known.computed
            or len(request.token_ids) != known.num_tokens
            or known.computed < 0
            or (is_async and _in_flight(request) != (known.placeholders, known.in_flight, known.stale))
        ):
            _tell_difference(history, known, request)
    running, waiting = state.running, state.waiting
    for request in running:
        if request.status != "running":
            history.report("one_queue", request.request_id, f"it runs, and its status is {request.status!r}")
    for request in waiting:
        if request.status == "running":
            history.report("one_queue", request.request_id, "it waits, and its status is 'running'")
    history.check_queues(tuple([each.request_id for each in running]), tuple([each.request_id for each in waiting]))


def _in_flight(request: RequestState) -> tuple[int, int, int]:
    return request.num_output_placeholders, request.num_in_flight_tokens, request.num_stale_output_tokens


def _tell_difference(history: History, known: Known, request: RequestState) -> None:
    name, pairs = known.request_id, [("num_kv_computed", request.num_kv_computed, known.computed)]
    if history.limits.asynchronous:
        fields = ("num_output_placeholders", "num_in_flight_tokens", "num_stale_output_tokens")
        pairs += zip(fields, _in_flight(request), (known.placeholders, known.in_flight, known.stale))
    for field, its, mine in pairs:
        if its < 0:
            history.report("not_negative", name, f"{field} is {its}")
        if its != mine:
            history.report("recounted", name, f"{field} is {its}, the steps make it {mine}")
    if len(request.token_ids) != known.num_tokens:
        num_output = len(request.token_ids) - known.num_prompt_tokens
        what = f"it has {num_output} output tokens, {known.num_output_tokens} were delivered"
        history.report("tokens_delivered", name, what)
