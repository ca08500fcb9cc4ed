"""All token sequences whose KV was computed at some time, as a radix tree: how far a new one is a repetition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Repetition(NamedTuple):
    """The longest beginning of a sequence that was computed before.

    Attributes:
        num_tokens: Its length.
        first: The request that computed all of it first; None if its length is 0.
        diverging: The first request that computed another token behind it; None if nobody did.
        other_token: That token.
    """

    num_tokens: int
    first: str | None
    diverging: str | None
    other_token: int | None


class _Node:
    """An edge of the tree with the node at its end.

    Attributes:
        tokens: The tokens of the edge.
        start: Number of tokens before it.
        parent: The edge before it; None at the root.
        first: The request that computed it first.
        is_shared: Whether others computed some of it as well.
        children: The edges behind it by their first token, in the order in which they were computed.
    """

    __slots__ = ("children", "first", "is_shared", "parent", "start", "tokens")

    def __init__(self, tokens: list[int], start: int, parent: _Node | None, first: str) -> None:
        self.tokens, self.start, self.parent, self.first = tokens, start, parent, first
        self.is_shared = False
        self.children: dict[int, _Node] = {}

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class ComputedTokens:
    """The tree. A request's sequence may grow; what was computed stays in the tree when its KV is gone."""

    def __init__(self) -> None:
        self._root = _Node([], 0, None, "")
        self._places: dict[str, tuple[_Node, int]] = {}

    def add(self, request_id: str, tokens: Sequence[int], num_computed: int) -> None:
        """Note that the KV of a request's first ``num_computed`` tokens is computed. Earlier tokens never change."""
        node, depth = self._places.get(request_id, (self._root, 0))
        while depth <= node.start and node.parent is not None:  # the edge was split
            node = node.parent
        while depth < num_computed:
            if depth == node.end:
                child = node.children.get(tokens[depth])
                if child is not None:
                    node = child
                elif node.first == request_id and not node.is_shared and not node.children:
                    node.tokens += tokens[depth:num_computed]
                    depth = num_computed
                else:
                    child = _Node(list(tokens[depth:num_computed]), depth, node, request_id)
                    node.children[tokens[depth]] = node = child
                    depth = num_computed
                continue
            length = _common(node.tokens, depth - node.start, tokens, depth, num_computed)
            depth += length
            if length and node.first != request_id:
                node.is_shared = True
            if depth < min(num_computed, node.end):
                node = self._split(node, depth)
        if depth:
            self._places[request_id] = node, depth

    def _split(self, node: _Node, depth: int) -> _Node:
        """Split an edge; its object stays the part after ``depth``, which places in it may refer to."""
        assert node.parent is not None
        length = depth - node.start
        upper = _Node(node.tokens[:length], node.start, node.parent, node.first)
        upper.is_shared = True
        node.parent.children[upper.tokens[0]] = upper
        node.tokens, node.start, node.parent = node.tokens[length:], depth, upper
        upper.children[node.tokens[0]] = node
        return upper

    def longest(self, tokens: Sequence[int]) -> Repetition:
        """The longest beginning of a sequence that was computed before."""
        node, depth = self._root, 0
        while depth < len(tokens):
            if depth == node.end:
                child = node.children.get(tokens[depth])
                if child is None:
                    break
                node = child
            length = _common(node.tokens, depth - node.start, tokens, depth, len(tokens))
            depth += length
            if depth < node.end:
                break
        first = node.first if depth else None
        if depth < node.end:
            return Repetition(depth, first, node.first, node.tokens[depth - node.start])
        other = next(iter(node.children.values()), None) if depth < len(tokens) else None
        if other is None:
            return Repetition(depth, first, None, None)
        return Repetition(depth, first, other.first, other.tokens[0])


def _common(edge: list[int], place: int, tokens: Sequence[int], depth: int, end: int) -> int:
    """Number of equal tokens from a place in an edge, and from a depth in a sequence up to ``end``."""
    length = min(len(edge) - place, end - depth)
    if edge[place : place + length] == list(tokens[depth : depth + length]):
        return length
    return next(index for index in range(length) if edge[place + index] != tokens[depth + index])
