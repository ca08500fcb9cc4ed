"""The prompts that were sent to one replica, in a radix tree, as cache-aware routers keep them."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush


class _Node:
    __slots__ = ("children", "parent", "tokens", "used")

    def __init__(self, tokens: Sequence[int], parent: _Node | None, used: int) -> None:
        self.tokens = tokens
        self.parent = parent
        self.used = used
        self.children: dict[int, _Node] = {}


class PrefixTree:
    """Prompts in a tree that shares their common beginnings.

    Attributes:
        num_tokens: Tokens in the tree, shared ones once.

    Example:
        >>> tree = PrefixTree()
        >>> tree.insert([1, 2, 3, 4])
        >>> tree.match([1, 2, 9]), tree.num_tokens
        (2, 4)
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._root = _Node((), None, 0)
        self._clock = 0

    def match(self, prompt: Sequence[int]) -> int:
        """Tokens at the beginning of a prompt that a prompt in the tree begins with as well."""
        node, place = self._root, 0
        while place < len(prompt) and (child := node.children.get(prompt[place])) is not None:
            shared = _shared(child.tokens, prompt, place)
            place += shared
            if shared < len(child.tokens):
                break
            node = child
        return place

    def insert(self, prompt: Sequence[int]) -> None:
        """Add a prompt; its way through the tree counts as used now."""
        self._clock += 1
        node, place = self._root, 0
        while place < len(prompt):
            child = node.children.get(prompt[place])
            if child is None:
                node.children[prompt[place]] = _Node(prompt[place:], node, self._clock)
                self.num_tokens += len(prompt) - place
                return
            shared = _shared(child.tokens, prompt, place)
            if shared < len(child.tokens):
                child = self._split(child, shared)
            child.used = self._clock
            node, place = child, place + shared

    def _split(self, node: _Node, length: int) -> _Node:
        """Put a node for the first ``length`` tokens of another above it, and return it."""
        assert node.parent is not None
        above = _Node(node.tokens[:length], node.parent, node.used)
        node.parent.children[node.tokens[0]] = above
        node.tokens, node.parent = node.tokens[length:], above
        above.children[node.tokens[0]] = node
        return above

    def evict(self, max_tokens: int) -> None:
        """Remove the leaves that were not used for the longest time until at most ``max_tokens`` are left."""
        if self.num_tokens <= max_tokens:
            return
        leaves: list[tuple[int, int, _Node]] = []
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children.values())
            if not node.children and node.parent is not None:
                leaves.append((node.used, len(leaves), node))
        count = len(leaves)
        heapify(leaves)
        while self.num_tokens > max_tokens and leaves:
            leaf = heappop(leaves)[2]
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.tokens[0]]
            self.num_tokens -= len(leaf.tokens)
            if not parent.children and parent.parent is not None:
                count += 1
                heappush(leaves, (parent.used, count, parent))


def _shared(tokens: Sequence[int], prompt: Sequence[int], place: int) -> int:
    """Length of the common beginning of some tokens and of a prompt from a place on."""
    length = min(len(tokens), len(prompt) - place)
    if tokens[:length] == prompt[place : place + length]:
        return length
    low, high = 0, length  # the first ``low`` tokens agree, the first ``high`` do not
    while high - low > 1:
        middle = (low + high) // 2
        if tokens[low:middle] == prompt[place + low : place + middle]:
            low = middle
        else:
            high = middle
    return low
