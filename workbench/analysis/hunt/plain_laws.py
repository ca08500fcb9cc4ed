"""The laws in a few plain lines each, for generated tests, which import nothing of Workbench.

A check looks at a run after each step. It knows less than `workbench.trace.laws`, and enough to fail on the smallest
case of a finding and to pass when the fault is mended.
"""

from __future__ import annotations

from typing import Any


class Check:
    """The check of every run: it must not crash, and must come to its end."""

    def added(self, request: Any) -> None:
        """Called when a request arrives."""

    def scheduled(self, run: Any, plan: Any) -> None:
        """Called when a step is scheduled."""

    def updated(self, run: Any, plan: Any, latest: Any, ended: Any) -> None:
        """Called when the output of a step has been taken in."""

    def proposed(self, drafts: Any) -> None:
        """Called when the scheduler has been given the drafts of the next step."""


class CheckOrder(Check):
    """Nobody waits behind a request that is served after it, and no running request is skipped."""

    def __init__(self) -> None:
        self.before: tuple[str, ...] = ()

    def scheduled(self, run: Any, plan: Any) -> None:
        """Compare the waiting requests with those that run and those that are new."""
        self._skipped(run, plan)
        for name in plan.waiting:
            waits = run.requests[name]
            for other in map(run.requests.get, plan.running):
                full = len(plan.running) >= run.config.get("max_num_seqs", 16)
                inverted = run.config.get("policy") == "priority" and waits.priority < other.priority and full
                assert not inverted or name in plan.preempted, f"{name} waits, {other.request_id} runs behind it"
            for other in map(run.requests.get, plan.admitted):
                behind = waits.status == "preempted" and waits.priority <= other.priority and name not in plan.preempted
                first = (waits.priority, waits.arrival_time) < (other.priority, other.arrival_time)
                assert not behind and not first, f"{name} waits, and {other.request_id} is admitted"

    def _skipped(self, run: Any, plan: Any) -> None:
        """A running request without a token, while one behind it has some or budget is left; some settings allow it."""
        before, self.before = self.before, plan.running
        allowed = "a running request is skipped" in getattr(run.scheduler, "allows", ())
        allowed = allowed or any(run.config.get(name) for name in ("kv_cache_groups", "max_num_active_seqs"))
        got = {chunk.request_id: chunk.num_tokens for chunk in plan.chunks}
        if allowed or not got:
            return
        last = max((place for place, name in enumerate(before) if name in got), default=-1)
        budget = run.config.get("max_num_scheduled_tokens") or run.config["max_num_batched_tokens"]
        is_left = budget > sum(got.values()) + (run.config.get("num_speculative_tokens") or 0) * (1 + len(got))
        is_left = is_left and not {*before[last + 1 :]} & {*plan.preempted}  # one that found no block ends the step
        for place, name in enumerate(before):
            if name not in plan.running or name in got or not (place < last or is_left):
                continue
            request = run.requests[name]
            most = min(request.num_prompt_tokens + request.max_tokens, run.config.get("max_model_len") or 1 << 60)
            ends = len(request.token_ids) + request.num_expected >= most  # its last token is on its way
            assert ends, f"{name} runs and gets no token, {budget - sum(got.values())} of the budget are left"


class CheckUtilisation(Check):
    """No step is empty while a request could run."""

    def scheduled(self, run: Any, plan: Any) -> None:
        """A step without tokens has nobody waiting, unless blocks are short."""
        assert plan.chunks or not plan.waiting, f"step {plan.step} schedules nothing, {plan.waiting} wait"


class CheckContent(Check):
    """A block that the prefix cache can find was computed, and a request reads its own prefix."""

    def __init__(self) -> None:
        self.written: dict[int, int] = {}
        self.prefixes: dict[tuple[int, int], tuple[int, ...]] = {}

    def scheduled(self, run: Any, plan: Any) -> None:
        """Note the rows that the step writes, and look at every cached block, or else at every row that is read."""
        if not hasattr(run.scheduler, "pool"):
            self._read(run, plan)
            return
        sizes = [group.get("block_size", run.config["block_size"]) for group in run.config.get("kv_cache_groups", [{}])]
        for chunk in plan.chunks:
            for size, table in zip(sizes, plan.tables[chunk.request_id]):
                for position in range(chunk.start, chunk.start + chunk.num_tokens):
                    block = table[position // size]
                    self.written[block] = self.written.get(block, 0) + 1 if position % size else 1
        for block in run.scheduler.pool()["cached_blocks"]:
            done = self.written.get(block, 0)
            assert done >= min(sizes), f"block {block} is in the prefix cache, and {done} of its tokens were computed"

    def _read(self, run: Any, plan: Any) -> None:
        size = run.config["block_size"]
        for chunk in plan.chunks:
            (table,), tokens = plan.tables[chunk.request_id], tuple(run.requests[chunk.request_id].token_ids)
            for position in range(chunk.start + chunk.num_tokens):
                row, prefix = (table[position // size], position % size), tokens[: position + 1]
                if position >= chunk.start:
                    self.prefixes[row] = prefix
                assert self.prefixes.get(row) == prefix, f"{chunk.request_id} reads another prefix in block {row[0]}"


class CheckBlocks(Check):
    """Free blocks and held blocks are the pool, and none is both."""

    def scheduled(self, run: Any, plan: Any) -> None:
        """Count the blocks."""
        held = {block for name in run.requests for table in run.scheduler.block_tables(name) for block in table} - {0}
        free = run.scheduler.free_blocks()
        num_free = free if isinstance(free, int) else len(free)
        assert isinstance(free, int) or not held & set(free), f"blocks {held & set(free)} are held and free"
        assert num_free + len(held) == run.config["num_blocks"] - 1, f"{num_free} are free and {len(held)} are held"

    def updated(self, run: Any, plan: Any, latest: Any, ended: Any) -> None:
        """Count the blocks again."""
        self.scheduled(run, latest)


class CheckLimits(Check):
    """No limit is exceeded."""

    def scheduled(self, run: Any, plan: Any) -> None:
        """Count tokens and seats."""
        budget = run.config.get("max_num_scheduled_tokens") or run.config["max_num_batched_tokens"]
        num_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
        assert num_tokens <= budget, f"step {plan.step} has {num_tokens} tokens, the budget is {budget}"
        seats = run.config["max_num_seqs"]
        assert len(plan.running) <= seats or not plan.admitted, f"{len(plan.running)} requests run, {seats} may"
        cap = run.config.get("long_prefill_token_threshold") or budget
        if not run.config.get("long_prefill_token_threshold_adaptive"):
            for chunk in plan.chunks:
                assert chunk.num_tokens <= cap, f"{chunk.request_id} gets {chunk.num_tokens} tokens, the cap is {cap}"


class CheckCounters(Check):
    """A request continues where it stopped."""

    def __init__(self) -> None:
        self.ends: dict[str, int] = {}

    def scheduled(self, run: Any, plan: Any) -> None:
        """Compare each chunk with the end of the one before."""
        for name in plan.preempted:
            self.ends.pop(name, None)
        for chunk in plan.chunks:
            assert chunk.num_tokens > 0, f"{chunk.request_id} gets {chunk.num_tokens} tokens"
            end = self.ends.get(chunk.request_id, chunk.start)
            assert chunk.start <= end, f"{chunk.request_id} continues at {chunk.start}, it has {end}"
            self.ends[chunk.request_id] = chunk.start + chunk.num_tokens


class CheckExactlyOnce(Check):
    """Each request is in one queue, and gets each of its tokens once."""

    def scheduled(self, run: Any, plan: Any) -> None:
        """Look for requests that are lost or queued twice."""
        names = sorted([*plan.running, *plan.waiting])
        assert names == sorted(run.requests), f"{sorted(run.requests)} are unfinished, {names} are queued"
        chunks = [chunk.request_id for chunk in plan.chunks]
        assert len(chunks) == len(set(chunks)), f"{chunks} are scheduled"

    def updated(self, run: Any, plan: Any, latest: Any, ended: Any) -> None:
        """Look at the lengths of the outputs."""
        for name, request in run.requests.items():
            length = len(request.token_ids) - request.num_prompt_tokens
            assert length < request.max_tokens, f"{name} has {length} tokens, max_tokens is {request.max_tokens}"


CHECKS: dict[str, type[Check]] = {
    "order": CheckOrder,
    "utilisation": CheckUtilisation,
    "content": CheckContent,
    "blocks": CheckBlocks,
    "limits": CheckLimits,
    "counters": CheckCounters,
    "exactly_once": CheckExactlyOnce,
}
"""The check of each law; crash and progress need none."""
