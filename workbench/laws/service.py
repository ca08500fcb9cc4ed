"""The predicates about service: in what order requests are served, and whether they are."""

from __future__ import annotations

from workbench.laws.history import Known
from workbench.laws.moment import Findings, Moment
from workbench.laws.state import Limits

# -- order -----------------------------------------------------------------------------------------------------


def queue_order(moment: Moment) -> Findings:
    """Waiting requests stand in the order of the policy; a preempted one goes back to its head."""
    history, previous = moment.history, None
    for name in moment.step.waiting:
        if (known := history.requests.get(name)) is None or (moment.limits.has_own_order and known.preemption >= 0):
            continue
        if previous is not None and history.rank(known) < history.rank(previous):
            yield name, f"it stands behind {previous.request_id!r}"
        previous = known


def overtaking(moment: Moment) -> Findings:
    """Nobody is admitted before a request that stands in front of it, or before a preempted one of its priority."""
    history, step = moment.history, moment.step
    new = [known for name in (*step.admitted, *step.resumed) if (known := history.requests.get(name)) is not None]
    if not new or moment.limits.has_own_order:
        return
    last = max(new, key=lambda known: known.waited_as)
    lowest = max((known for known in new if known.preemption < 0), default=None, key=lambda known: known.priority)
    for name in step.waiting:
        known = history.requests.get(name)
        if known is None or known.stale or name in step.preempted:
            continue
        if history.rank(known) < last.waited_as:
            yield name, f"it waits, and {last.request_id!r} behind it is admitted"
        elif lowest is None or known.priority > lowest.priority:
            break
        elif known.preemption >= 0 and known.priority == lowest.priority:
            yield name, f"it was preempted and waits, and {lowest.request_id!r} is new", "preempted_behind_newcomers"


def skipped(moment: Moment) -> Findings:
    """A running request that could continue gets nothing while one behind it does."""
    history, limits = moment.history, moment.limits
    if limits.has_own_order or limits.caches_states:
        return
    scheduled = {chunk.request_id for chunk in moment.step.chunks}
    gone = False
    for known in reversed(history.before):
        if known.request_id in scheduled:
            gone = True
        elif gone and known.status == "running" and _can_continue(known, limits):
            yield known.request_id, "it gets no token, and one that was admitted later does"


def _can_continue(known: Known, limits: Limits) -> bool:
    """Whether a running request has a token to compute; one whose last token is on its way has none."""
    if known.num_tokens is None or known.num_left <= 0:
        return False
    if limits.max_model_len is not None and known.computed + 1 >= limits.max_model_len:
        return False
    most = known.num_prompt_tokens + known.request.max_tokens
    return not (known.placeholders and known.computed + 2 - known.placeholders >= most)


def victims(moment: Moment) -> Findings:
    """The last admitted request is preempted first, with priorities the one of the lowest."""
    history = moment.history
    if not moment.step.preempted or history.limits.has_policy:
        return
    kept = [known for known in history.before if known.status == "running"]
    for name in moment.step.preempted:
        victim = history.requests.get(name)
        if victim is None:
            continue
        for known in kept:
            if history.victim_rank(known) > history.victim_rank(victim):
                yield name, f"it is preempted, and {known.request_id!r} keeps its blocks"
                break


def inversion(moment: Moment) -> Findings:
    """A waiting request does not wait for the seat of one of lower priority."""
    history, limits = moment.history, moment.limits
    if limits.policy != "priority" or not moment.step.waiting:
        return
    running = history.running
    if limits.max_running is None or len(running) < limits.max_running:
        return
    lowest = max(running, key=lambda known: known.priority)
    for name in moment.step.waiting:
        known = history.requests.get(name)
        if known is not None and known.priority < lowest.priority and name not in moment.step.preempted:
            what = f"priority {known.priority} waits for a seat, and {lowest.request_id!r} runs with {lowest.priority}"
            yield name, what, "priority_waits_at_full_seats"


# -- utilisation -----------------------------------------------------------------------------------------------


def empty_step(moment: Moment) -> Findings:
    """A step without a chunk is a step in which nobody could run."""
    history, limits, step = moment.history, moment.limits, moment.step
    if step.chunks or step.preempted or limits.has_policy or not history.requests:
        return
    for known in history.running:
        if _can_continue(known, limits):
            yield known.request_id, f"nothing is scheduled, and it has {known.num_left} tokens to compute"
            return
    if not step.waiting or (head := history.requests.get(step.waiting[0])) is None or head.stale:
        return
    if limits.max_running is not None and len(step.running) >= limits.max_running:
        exception = "finished_rows_keep_seats" if limits.asynchronous else ""
        yield head.request_id, "nothing is scheduled, and requests that are done hold its seat", exception
    elif head.num_tokens is not None and not limits.caches_states and limits.token_budget > limits.num_drafts + 1:
        num_slots = head.num_tokens + 2 * limits.num_drafts
        needed = sum(-(-num_slots // group.block_size) + limits.num_drafts + 1 for group in limits.groups)
        needed = -(-num_slots // limits.groups[0].block_size) if limits.is_plain else needed
        reserve = limits.num_watermark_blocks if step.running else 0
        fits = limits.chunked_prefill or num_slots <= limits.token_budget
        if fits and needed <= step.free_blocks - reserve:
            yield head.request_id, f"nothing is scheduled, it needs {needed} blocks and {step.free_blocks} are free"


# -- progress --------------------------------------------------------------------------------------------------


def livelock(moment: Moment) -> Findings:
    """While no token is delivered and nobody comes or goes, no state comes twice."""
    history, step = moment.history, moment.step
    if history.delivered_since:
        history.seen.clear()
        history.delivered_since = False
        return
    if not history.requests or history.limits.has_policy:  # a policy may decide by the time
        return
    progress = tuple([(known.request_id, known.computed, known.in_flight) for known in history.running])
    present = (progress, tuple(step.waiting), step.free_blocks, bool(step.chunks))
    if present in history.seen:
        first = (*step.running, *step.waiting)[0]
        yield first, f"{len(step.running)} run, {len(step.waiting)} wait, and nothing will change"
    history.seen.add(present)
