"""The holders of each KV block, by the changes that steps name, compared with the pool's own account of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from workbench.trace.laws.known import Findings, Known
from workbench.trace.laws.state import Chunk, Limits, Step
from workbench.trace.pool_change import NO_CHANGE, PoolChange


class Tables:
    """The holders of every block, counted from the changes of block tables.

    Args:
        limits: The limits in force.
        findings: Takes what is wrong.
        whole: The first step seen is the first of the run.

    Attributes:
        held: For each held block the number of table places that hold it.
        touched: Blocks that were taken or given back since the set was last emptied.
        cached: Blocks in the prefix cache, as named by the steps; None if it is not known.
    """

    def __init__(self, limits: Limits, findings: Findings, *, whole: bool) -> None:
        self.held: dict[int, int] = {}
        self.touched: set[int] = set()
        self.cached: set[int] | None = set() if whole else None
        self._find = findings.add
        self._limits = limits
        self._lost: set[int] = set()
        self._taken: set[int] = set()
        self._end = (-1, NO_CHANGE, 0)  # of a step: what it named after scheduling, as far as it was seen

    def change(self, known: Known, chunk: Chunk, *, admitted: bool) -> list[int]:
        """Change a request's tables as its chunk says.

        Returns:
            The lengths of the tables before.
        """
        tables = known.tables
        changes = (chunk, *chunk.other_groups)
        if admitted:
            self.drop(known)
            tables = known.tables
        lengths = [len(table) for table in tables]
        for table, change in zip(tables, changes):
            for place in change.removed:
                if place < len(table) and (block := table[place]):
                    self._lose(block)
                    table[place] = 0
        held, touched = self.held, self.touched
        for index, (table, change) in enumerate(zip(tables, changes)):
            if not (new := change.new_block_ids):
                continue
            found = chunk.num_cached_tokens // self._limits.groups[index].block_size if admitted else 0
            for place, block in enumerate(new, len(table)):
                if not block:
                    if self._limits.is_plain:
                        self._find("references", known.request_id, "block 0 is handed out")
                    continue
                if place >= found:
                    if block in held:
                        self._find("taken", known.request_id, f"block {block} is handed out, and it is held")
                    self._taken.add(block)
                held[block] = held.get(block, 0) + 1
                touched.add(block)
            table += new
        return lengths

    def follow(self, known: Known, tables: Sequence[Sequence[int]]) -> list[int]:
        """Give a request the tables that the scheduler shows, if its chunks do not name the changes.

        Returns:
            For each table the number of its first places that have not changed.
        """
        lengths = []
        for mine, its in zip(known.tables, tables):
            pairs = enumerate(zip(mine, its))
            lengths.append(next((place for place, (old, new) in pairs if old != new), min(len(mine), len(its))))
            for block in filter(None, mine[lengths[-1] :]):
                self._lose(block)
            mine[lengths[-1] :] = its[lengths[-1] :]
        for mine, length in zip(known.tables, lengths):
            for block in filter(None, mine[length:]):
                self.held[block] = self.held.get(block, 0) + 1
                self.touched.add(block)
        return lengths

    def hold(self, known: Known, tables: Sequence[Sequence[int]]) -> None:
        """Give a request the tables that it had before the first step seen."""
        known.tables = [list(table) for table in tables]
        for table in known.tables:
            for block in table:
                if block:
                    self.held[block] = self.held.get(block, 0) + 1
                elif self._limits.is_plain:
                    self._find("references", known.request_id, "block 0 is handed out")

    def drop(self, known: Known) -> None:
        """Take a request's tables."""
        for table in known.tables:
            for block in table:
                if block:
                    self._lose(block)
        known.tables = [[] for _ in known.tables]

    def _lose(self, block: int) -> None:
        self.touched.add(block)
        if count := self.held[block] - 1:
            self.held[block] = count
        else:
            del self.held[block]
            self._lost.add(block)

    # -- what the pool says ------------------------------------------------------------------------------------

    def scheduled(self, step: Step) -> None:
        """Compare with the pool's own account of scheduling."""
        num_cached = len(step.cached_block_ids) - step.num_cached_end
        unscheduled = set()
        for request_id, blocks in step.unscheduled_block_ids.items():
            unscheduled.update(blocks)
            for change in step.unscheduled_changes.get(request_id, ()):
                unscheduled.update(change.new_block_ids)
        for load in step.loads:
            unscheduled.update(load.hit_ids, load.block_ids)
        self._compare(step.pool, step.cached_block_ids[:num_cached], {*unscheduled, *step.withdrawn_block_ids})

    def updated(self, step: Step, *, failed: bool) -> None:
        """Compare with the pool's account of what came after. It may have grown since it was last seen.

        Args:
            step: The step.
            failed: A request ended with an error, and its blocks leave the prefix cache.
        """
        change: PoolChange | None = step.pool_end
        cached = step.cached_block_ids[len(step.cached_block_ids) - step.num_cached_end :]
        if change is not None and self._end[0] == step.step:
            seen, num_seen = self._end[1:]
            self._end = (step.step, change, len(cached))
            cached = cached[num_seen:]
            if seen is change:
                change = NO_CHANGE
            elif seen is not NO_CHANGE:
                front, back, evicted = change.front, change.back, change.evicted[len(seen.evicted) :]
                change = PoolChange.of(evicted, front[: len(front) - len(seen.front)], back[len(seen.back) :])
        else:
            self._end = (step.step, change or NO_CHANGE, len(cached))
        self._compare(change, cached, None if failed else ())

    def _compare(self, change: PoolChange | None, cached: Sequence[int], aside: Collection[int] | None) -> None:
        """Compare a part of a step with the pool's account.

        Args:
            change: The account; None if there is none.
            cached: Blocks that were put into the prefix cache.
            aside: Blocks that were taken and given back within it; None for any.
        """
        lost, taken = self._lost, self._taken
        if change is None:
            self.cached = None
        elif change is not NO_CHANGE or lost:
            held = self.held
            given = {*change.front, *change.back}
            if not given.isdisjoint(held):
                self._find("given_back", "", f"block {min(given.intersection(held))} is given back, and it is held")
            if kept := lost.difference(given, held):
                self._find("given_back", "", f"block {min(kept)} is held no more, and it is not given back")
            if aside is not None and self.cached is not None and (others := given.difference(lost, aside)):
                self._find("given_back", "", f"block {min(others)} is given back, and it was not held")
            if self.cached is not None:
                self._compare_evicted(change.evicted, {*taken, *cached}, aside)
        if lost:
            self._lost = set()
        if taken:
            self._taken = set()
        if cached and self.cached is not None:
            self.cached.update(cached)

    def _compare_evicted(self, evicted: Sequence[int], reasons: Collection[int], aside: Collection[int] | None) -> None:
        assert self.cached is not None
        for block in evicted:
            if aside is not None and block not in aside:
                if block not in self.cached and block not in reasons:
                    self._find("evicted", "", f"block {block} is evicted, and it was not cached")
                elif block not in reasons:
                    self._find("evicted", "", f"block {block} is evicted, and it is not handed out")
            self.cached.discard(block)
