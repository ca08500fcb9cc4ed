"""Order, limits of an admission, utilisation and progress: is every request served as it should be?"""

from __future__ import annotations

from workbench.base.text import counted
from workbench.trace.laws.history import History
from workbench.trace.laws.known import Known
from workbench.trace.laws.state import Limits, Step, is_special


def _is_blocked(step: Step, name: str) -> bool:
    """Whether a waiting request waits for its grammar, its KV, or a slot of its adapter: others may overtake it."""
    reason = step.passed_over.get(name)
    return reason is not None and reason.kind in ("grammar", "transfer", "adapter")


# -- order -----------------------------------------------------------------------------------------------------


def queue_order(history: History, step: Step) -> None:
    """Waiting requests stand in the order of the policy; a preempted one goes back to its head."""
    if step.waiting == history.waiting:
        return
    history.waiting = step.waiting
    previous, its_rank, own_order = None, None, history.limits.has_own_order
    for name in step.waiting:
        if (known := history.requests.get(name)) is None or (own_order and known.preemption >= 0):
            continue
        rank = history.rank(known)
        if previous is not None and its_rank is not None and rank < its_rank:
            history.report("queue_order", name, f"it stands behind {previous.request_id!r}")
        previous, its_rank = known, rank


def overtaking(history: History, step: Step) -> None:
    """Nobody is admitted before a request that stands in front of it, or before a preempted one of its priority."""
    if not (step.admitted or step.resumed) or not step.waiting:
        return
    new = [known for name in (*step.admitted, *step.resumed) if (known := history.requests.get(name)) is not None]
    if not new:
        return
    last = max(new, key=lambda known: known.waited_as)
    lowest = max((known for known in new if known.preemption < 0), default=None, key=lambda known: known.priority)
    for name in step.waiting:
        known = history.requests.get(name)
        if known is None or known.stale or name in step.preempted or _is_blocked(step, name):
            continue
        if history.rank(known) < last.waited_as:
            history.report("overtaking", name, f"it waits, and {last.request_id!r} behind it is admitted")
        elif lowest is None or known.priority > lowest.priority:
            break
        elif known.preemption >= 0 and known.priority == lowest.priority:
            what = f"it was preempted and waits, and {lowest.request_id!r} is new"
            history.report("overtaking", name, what, "preempted_behind_newcomers")


def skipped(history: History, step: Step) -> None:
    """A running request that could continue gets nothing while one behind it does, or while budget is left."""
    limits, now, gone = history.limits, history.num_steps, False
    if len(step.chunks) >= len(history.running):
        return
    num_left = limits.token_budget - sum(chunk.num_tokens for chunk in step.chunks)
    is_left = bool(step.chunks) and num_left > limits.num_drafts * (1 + len(step.chunks))  # else it is `empty_step`
    for known in reversed(history.before):
        if known.scheduled_in == now:
            gone = True
        elif known.status == "preempted" and not gone:
            is_left = False  # it may be the one that found no block, which ends the turn of those behind it
    gone = False
    for known in reversed(history.before):
        if known.scheduled_in == now:
            gone = True
        elif (gone or is_left) and known.status == "running" and _can_continue(known, limits):
            what = "one that was admitted later does" if gone else f"{num_left} tokens of the budget are left"
            history.report("skipped", known.request_id, f"it gets no token, and {what}")


def starved(history: History, step: Step) -> None:
    """With ``max_num_partial_prefills`` every prompt in progress advances in every step."""
    if step.preempted or len(history.before) > (step.token_budget or history.limits.token_budget):
        return
    for known in history.before:
        is_passed_over = known.status == "running" and known.scheduled_in != history.num_steps
        if is_passed_over and known.num_left > 1 and _can_continue(known, history.limits):
            history.report("starved", known.request_id, f"it gets no token, {known.num_left} are left")


def _can_continue(known: Known, limits: Limits) -> bool:
    """Whether a running request has a token to compute; one whose last token is on its way has none."""
    if known.num_tokens is None or known.num_left <= 0:
        return False
    if limits.max_model_len is not None and known.computed + 1 >= limits.max_model_len:
        return False
    most = known.num_prompt_tokens + known.max_tokens
    return not (known.placeholders and known.computed + 2 - known.placeholders >= most)


def victims(history: History, step: Step) -> None:
    """The last admitted request is preempted first, with priorities the one of the lowest."""
    if not step.preempted:
        return
    kept = [known for known in history.before if known.status == "running"]
    for name in step.preempted:
        if (victim := history.requests.get(name)) is None:
            continue
        for known in kept:
            if history.victim_rank(known) > history.victim_rank(victim):
                history.report("victims", name, f"it is preempted, and {known.request_id!r} keeps its blocks")
                break


def inversion(history: History, step: Step) -> None:
    """A waiting request does not wait for the seat of one of lower priority."""
    running, max_running = history.running, history.limits.max_running
    if not step.waiting or max_running is None or len(running) < max_running:
        return
    lowest = max(running, key=lambda known: known.priority)
    for name in step.waiting:
        known = history.requests.get(name)
        if known is None or name in step.preempted or _is_blocked(step, name):
            continue
        if known.priority < lowest.priority:
            what = f"priority {known.priority} waits for a seat, and {lowest.request_id!r} runs with {lowest.priority}"
            history.report("inversion", name, what, "priority_waits_at_full_seats")


# -- limits of an admission ------------------------------------------------------------------------------------


def seats(history: History, step: Step) -> None:
    """The number of running requests is at most that of the seats; a limit that shrinks takes nobody's seat."""
    most, running = history.limits.max_running, step.running
    if most is not None and len(running) > most and (step.admitted or step.resumed):
        history.report("seats", running[-1], f"{len(running)} requests run, {most} may")


def watermark(history: History, step: Step) -> None:
    """An admission beside others leaves the blocks of the watermark free."""
    kept = history.limits.num_watermark_blocks
    if step.free_blocks < kept and (step.admitted or step.resumed) and len(step.running) > 1:
        newest = (*step.admitted, *step.resumed)[-1]
        history.report("watermark", newest, f"{step.free_blocks} blocks are free, the watermark is {kept}")


def whole_prompts(history: History, step: Step) -> None:
    """Without chunked prefill no prompt is split."""
    for chunk in step.chunks:
        if chunk.is_partial_prefill:
            history.report("whole_prompts", chunk.request_id, "its prompt is split, enable_chunked_prefill is off")


def partial_prefills(history: History, step: Step) -> None:
    """No more prompts are in progress than may be, and no more long ones."""
    new, limits = {*step.admitted, *step.resumed}, history.limits
    if not new:
        return
    partial = [known for known in history.running if known.num_left > 0 or known.num_tokens is None]
    long = [known for known in partial if known.long]
    for prompts, most, kind in (
        (partial, limits.max_partial_prefills, "prompts"),
        (long, limits.max_long_partial_prefills, "long prompts"),
    ):
        newest = next((known.request_id for known in reversed(prompts) if known.request_id in new), None)
        if most is not None and newest is not None and len(prompts) > most:
            history.report("partial_prefills", newest, f"{len(prompts)} {kind} are in progress, {most} may be")


# -- utilisation -----------------------------------------------------------------------------------------------


def empty_step(history: History, step: Step) -> None:
    """A step without a chunk is a step in which nobody could run."""
    limits = history.limits
    if step.chunks or step.preempted or not history.requests:
        return
    for known in history.running:
        if _can_continue(known, limits):
            what = f"nothing is scheduled, and it has {known.num_left} tokens to compute"
            return history.report("empty_step", known.request_id, what)
    first = next((name for name in step.waiting if not _is_blocked(step, name)), "")
    if (head := history.requests.get(first)) is None or head.stale:
        return
    if head.num_tokens is None:
        return
    num_slots, needed = head.num_tokens + 2 * limits.num_drafts, _most_blocks(limits, head.num_tokens)
    if needed > step.free_blocks - (limits.num_watermark_blocks if step.running else 0):
        return
    if limits.max_running is not None and len(step.running) >= limits.max_running:
        exception = "finished_rows_keep_seats" if limits.asynchronous else ""
        what = "nothing is scheduled, and requests that are done hold its seat"
        history.report("empty_step", head.request_id, what, exception)
        return
    fits = limits.chunked_prefill or num_slots <= limits.token_budget
    if fits and not limits.caches_states and limits.token_budget > limits.num_drafts + 1:
        what = f"nothing is scheduled, it needs {needed} blocks and {step.free_blocks} are free"
        history.report("empty_step", head.request_id, what)


def _most_blocks(limits: Limits, num_tokens: int) -> int:
    """Blocks with which a request can be admitted, whatever the prefix cache holds: at most those of all its tokens."""
    num_slots, most = num_tokens + 2 * limits.num_drafts, 0
    for group in limits.groups:
        size, num_blocks = group.block_size, -(-num_slots // group.block_size)
        if group.sliding_window and limits.max_in_flight:
            at_once = group.sliding_window - 1 + limits.max_in_flight + 2 * limits.num_drafts
            num_blocks = min(num_blocks, -(-at_once // size) + 1)
        most += num_blocks + (limits.num_drafts + 1 if group.kind == "mamba" else 0)
    return most


def cut_short(history: History, step: Step) -> None:
    """A chunk leaves tokens or drafts over only if a limit is reached, or no block is free."""
    limits, budget = history.limits, step.token_budget or history.limits.token_budget
    num_left = budget - sum(chunk.num_tokens for chunk in step.chunks)
    if limits.writes_ahead:  # a draft model takes a row per request
        num_left -= 1 + len(step.chunks)
    is_left = num_left > 0 and step.free_blocks > 0 and not step.preempted
    for chunk in step.chunks:
        if (known := history.requests.get(chunk.request_id)) is None:
            continue
        proposed, known.proposed = known.proposed, 0
        num_drafts = 0 if chunk.is_partial_prefill else len(chunk.drafts)
        if not is_left or is_special(chunk) or not (chunk.is_partial_prefill or num_drafts < proposed):
            continue
        if chunk.is_partial_prefill and limits.caches_states:
            continue
        if limits.max_model_len is not None and known.computed + 1 >= limits.max_model_len:
            continue
        if limits.caps_chunks and chunk.num_tokens >= _cap(history, step):
            continue
        given = f"{num_drafts} of {proposed} drafts" if num_drafts < proposed else f"{chunk.num_tokens} tokens"
        history.report("cut_short", known.request_id, f"it gets {given}, {num_left} tokens of the budget are left")


def _cap(history: History, step: Step) -> int:
    """The longest chunk under ``long_prefill_token_threshold``, which does not cut a request that is alone."""
    limits, num_requests = history.limits, len(history.requests)
    if step.long_prefill_cap is not None and num_requests <= 1:
        return limits.token_budget + 1
    return max(limits.long_threshold, limits.token_budget // num_requests if limits.adapts_cap else 0)


def left_out(history: History, step: Step) -> None:
    """The head of the queue waits only for a seat, for tokens or for blocks."""
    limits, budget = history.limits, step.token_budget or history.limits.token_budget
    if not step.waiting or not step.chunks or step.preempted or limits.caches_states or not limits.chunked_prefill:
        return
    if limits.max_running is None or len(step.running) >= limits.max_running:
        return
    num_left = budget - sum(chunk.num_tokens for chunk in step.chunks)
    first = next((name for name in step.waiting if not _is_blocked(step, name)), "")
    if (head := history.requests.get(first)) is None or head.stale or head.num_tokens is None:
        return
    needed, num_free = _most_blocks(limits, head.num_tokens), step.free_blocks - limits.num_watermark_blocks
    if num_left > limits.num_drafts * (2 + len(step.chunks)) and needed <= num_free:
        left = f"{counted(num_left, 'token')} of the budget are left"
        what = f"it needs {counted(needed, 'block')}, {num_free} are free, and {left}"
        history.report("left_out", first, what)


def needless(history: History, step: Step) -> None:
    """A request that takes the blocks of others needs the blocks that it asks for."""
    for name, reason in step.preempt_reasons.items():
        if reason.needed is None or len(reason.requests) != 1:
            continue
        chunk = next((chunk for chunk in step.chunks if chunk.request_id == reason.requests[0]), None)
        if chunk is None or not hasattr(chunk, "other_groups") or chunk.request_id in (*step.admitted, *step.resumed):
            continue
        num_taken = sum(block != 0 for change in (chunk, *chunk.other_groups) for block in change.new_block_ids)
        if reason.needed > num_taken:
            what = f"it loses its blocks because {chunk.request_id!r} needs {reason.needed}, which takes {num_taken}"
            history.report("needless", name, what)


def kept_out(history: History, step: Step) -> None:
    """While a prompt that may join waits for tokens, those in progress have no more than their share."""
    limits, budget = history.limits, step.token_budget or history.limits.token_budget
    if step.preempted or limits.max_running is None or len(step.running) >= limits.max_running:
        return
    first = next((name for name in step.waiting if not _is_blocked(step, name)), "")
    if not first or first in step.passed_over or sum(chunk.num_tokens for chunk in step.chunks) < budget:
        return
    before = {known.request_id for known in history.before}
    chunks = [chunk for chunk in step.chunks if chunk.request_id in before]
    longest = max(chunks, default=None, key=lambda chunk: chunk.num_tokens)
    num_joining = min(limits.max_running - len(before), len(step.waiting) + len(step.admitted) + len(step.resumed))
    least = sum(chunk.num_tokens > 1 or chunk.is_partial_prefill for chunk in chunks)
    share = 1
    for num_prompts in range(least, len(before) + 1):  # a last token of a prompt looks like a decode
        num_shares = max(num_prompts, min(limits.max_partial_prefills or 1, num_prompts + num_joining), 1)
        share = max(share, (budget - len(before) + num_prompts) // num_shares)
    if longest is not None and longest.num_tokens > share:
        what = f"it waits, and {longest.request_id!r} has {longest.num_tokens} tokens, its share is {share}"
        history.report("kept_out", first, what)


def cut(history: History, step: Step) -> None:
    """A prompt is cut to its share only if others use what is left of the budget."""
    limits, num_free = history.limits, step.free_blocks
    num_left = (step.token_budget or limits.token_budget) - sum(chunk.num_tokens for chunk in step.chunks)
    if num_left <= 0 or step.preempted:
        return
    for chunk in step.chunks:
        known = history.requests.get(chunk.request_id)
        if known is None or getattr(chunk, "limited_by", "") != "partial_prefill_slot":
            continue
        has_room = num_free > 0 or len(known.tables[0]) * limits.block_size > known.computed
        if has_room and _can_continue(known, limits):
            history.report("cut", known.request_id, f"it is cut, and {num_left} tokens of the budget are left")


# -- progress --------------------------------------------------------------------------------------------------


def livelock(history: History, step: Step) -> None:
    """While no token is delivered and nobody comes or goes, no state comes twice."""
    if history.delivered_since:
        history.seen.clear()
        history.delivered_since = False
        return
    if not history.requests or any(_is_blocked(step, name) for name in step.passed_over):
        return
    progress = tuple([(known.request_id, known.computed, known.in_flight) for known in history.running])
    present = (progress, tuple(step.waiting), step.free_blocks, bool(step.chunks))
    if present in history.seen:
        first = next(iter((*step.running, *step.waiting)), "")
        what = f"{len(step.running)} run, {len(step.waiting)} wait, and nothing will change"
        history.report("livelock", first, what)
    history.seen.add(present)
