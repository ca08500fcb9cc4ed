"""Keyed hashes of requests' blocks: they say which prefixes are equal, and nothing about the text.

The writer's process makes them, so that they cost the engine no more than sending the tokens. They are chained as in
vLLM and cover what vLLM's cover: the tokens, LoRA adapter, cache salt, and the multimodal inputs in a block. Without
the key, which is never stored, nobody can test whether a text has a hash.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from math import gcd

from workbench.trace.checks import groups_of
from workbench.trace.lines import HASH_DIGITS, PrefixHashes, TraceMeta
from workbench.trace.recorders.messages import Arrival


class _Chain:
    """The tokens of a request, and its last hash.

    Attributes:
        tokens: All known tokens.
        inputs: Identifier, first position and length of each multimodal input.
        digest: The last hash, or what stands for it before the first block.
        num_blocks: Number of hashed blocks.
    """

    __slots__ = ("digest", "inputs", "num_blocks", "tokens")

    def __init__(self, tokens: list[int], inputs: Sequence[tuple[str, int, int]], digest: bytes) -> None:
        self.tokens, self.inputs, self.digest, self.num_blocks = tokens, inputs, digest, 0


class BlockHasher:
    """Hashes the full blocks of requests, from their arrival to their end.

    Args:
        key: The random key of the run.
        meta: First line of the trace; its configuration has the size of a block.
        num_lookahead_tokens: Tokens after a block that its hash covers too, as with EAGLE.

    Attributes:
        key: The key.
        described: The hashes as the header of a trace describes them.
    """

    def __init__(self, key: bytes, meta: TraceMeta, num_lookahead_tokens: int = 0) -> None:
        self.key = key
        self._size = gcd(*[group.block_size for group in groups_of(meta)])
        self._lookahead = num_lookahead_tokens
        self._chains: dict[str, _Chain] = {}
        self.described = PrefixHashes(self._hash(b"key id").hex(), self._size, num_lookahead_tokens)

    def begin(self, arrival: Arrival) -> str:
        """The hashes of a request's prompt; "" for one without tokens, such as a prompt of embeddings."""
        if not arrival.prompt_token_ids:
            return ""
        root = self._hash(repr((arrival.lora, arrival.cache_salt)).encode("utf-8", "surrogatepass"))
        chain = self._chains[arrival.request_id] = _Chain(arrival.prompt_token_ids, arrival.inputs, root)
        return self._extend(chain)

    def end(self, request_id: str, output_token_ids: Sequence[int]) -> str:
        """The hashes of the blocks after those of the prompt's hashes; the request is forgotten."""
        chain = self._chains.pop(request_id, None)
        if chain is None:
            return ""
        chain.tokens += output_token_ids
        return self._extend(chain)

    def _extend(self, chain: _Chain) -> str:
        hashes = []
        for block in range(chain.num_blocks, (len(chain.tokens) - self._lookahead) // self._size):
            start, end = block * self._size, (block + 1) * self._size
            content = array("q", chain.tokens[start : end + self._lookahead]).tobytes()
            inside = [(name, at - start) for name, at, length in chain.inputs if at < end and start < at + length]
            if inside:
                content += repr(inside).encode()
            chain.digest = self._hash(chain.digest + content)
            hashes.append(chain.digest.hex())
        chain.num_blocks += len(hashes)
        return "".join(hashes)

    def _hash(self, content: bytes) -> bytes:
        return blake2b(content, key=self.key, digest_size=HASH_DIGITS // 2).digest()
