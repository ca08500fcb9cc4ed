"""Watch vLLM's block pool, call by call, in the engine's process.

The pool tells nobody which blocks it evicts and to which end of its free queue it puts blocks back. So four methods of
its parts are replaced, on these objects alone, by ones that also append to a list. Two of them run for every block that
is cached or evicted: they do the usual case, one block for a content, themselves, which costs no more than before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_QUEUE_METHODS, _MAP_METHODS = ("prepend_n", "append_n"), ("insert", "pop")


class PoolWatch:
    """Notes the blocks that are cached, evicted and given back.

    Args:
        pool: vLLM's block pool.

    Raises:
        AttributeError: The pool is that of another version, and cannot be watched.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._queue = pool.free_block_queue
        self._content: list[int] = []
        self._given_back: list[tuple[bool, list[Any]]] = []
        for name in _QUEUE_METHODS:
            setattr(self._queue, name, self._giving_back(getattr(self._queue, name), name == "prepend_n"))
        self._watch_content()

    def _giving_back(self, method: Callable[[list[Any]], None], to_front: bool) -> Callable[[list[Any]], None]:
        given_back = self._given_back

        def watched(blocks: list[Any]) -> None:
            if blocks:
                given_back.append((to_front, blocks))
                method(blocks)

        return watched

    def _watch_content(self) -> None:
        note = self._content.append
        self._map = found = self._pool.cached_block_hash_to_block
        insert, pop = found.insert, found.pop
        is_plain = self._is_a_dict(type(found))
        blocks = found._cache if is_plain else {}

        def watched_insert(key: Any, block: Any) -> None:
            note(block.block_id)
            if key in blocks or not is_plain:
                insert(key, block)
            else:
                blocks[key] = block

        def watched_pop(key: Any, block_id: int) -> Any:
            note(-block_id)
            block = blocks.get(key)
            if getattr(block, "block_id", None) != block_id:  # nothing, another block or several
                return pop(key, block_id)
            del blocks[key]
            return block

        found.insert, found.pop = watched_insert, watched_pop

    def _is_a_dict(self, kind: type) -> bool:
        """Whether a map of this class does no more for one block of a content than put it into a dict."""
        probe, block = kind(), self._pool.blocks[0]
        probe.insert(b"", block)
        inserted = vars(probe) == {"_cache": {b"": block}}
        return inserted and probe.pop(b"", block.block_id) is block and vars(probe) == {"_cache": {}}

    def take(self) -> tuple[()] | tuple[str, list[int], list[tuple[bool, list[int]]]]:
        """Events since the last call as a PoolNews; empty for nothing."""
        content, given_back = self._content, self._given_back
        if not (content or given_back):
            return ()
        news = (
            "pool",
            content.copy(),
            [
                (to_front, [block.block_id for block in blocks if block.next_free_block is not None])
                for to_front, blocks in given_back
            ],
        )
        content.clear()
        given_back.clear()
        return news

    def cached_blocks(self) -> list[int]:
        """The blocks whose content can be found. Looks at every block."""
        return [block.block_id for block in self._pool.blocks if block.block_hash is not None]

    def was_reset(self, cached_before: list[int]) -> None:
        """The pool may have forgotten the content of all blocks, which it does with a new map."""
        if self._pool.cached_block_hash_to_block is not self._map:
            self._content.extend(-block for block in cached_before)
            self._watch_content()

    def stop(self) -> None:
        """Let the pool's own methods be called again."""
        for owner, names in ((self._queue, _QUEUE_METHODS), (self._map, _MAP_METHODS)):
            for name in names:
                vars(owner).pop(name, None)
