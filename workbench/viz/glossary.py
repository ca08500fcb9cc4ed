"""The words of the interface, each with its meaning: the one glossary of views and documentation.

``docs/glossary.md`` says the same with the field that shows each word; a test compares them.
"""

from __future__ import annotations

TERMS: dict[str, str] = {
    "batch": "The rows that one forward pass computes, of all requests together. It changes with every step.",
    "block": (
        "A piece of KV memory for block_size tokens, the same in every layer. Blocks are handed out and "
        "given back whole."
    ),
    "block table": "The blocks of one request in the order of its tokens.",
    "budget": "Maximum number of tokens in a step: max_num_batched_tokens.",
    "chunk": "The tokens of one request in one step: a whole prompt, a part of it, or one decoded token.",
    "continuous batching": "Requests join and leave the batch at every step; nobody waits for the longest answer.",
    "decode": (
        "The step of a request that computes its newest token to get the next one. It reads all weights for one row."
    ),
    "draft": "A guessed token that the model verifies together with the last known one (speculative decoding).",
    "hit rate": "Share of the prompt tokens that the prefix cache had when their requests were first admitted.",
    "ITL": "Inter-token latency: the time between two output tokens of a request.",
    "KV cache": (
        "The keys and values of all tokens so far, for every layer. With them a new token needs no other "
        "computation of old ones."
    ),
    "logits": "The model's scores for every token of the vocabulary; softmax turns them into probabilities.",
    "mask": (
        "The pairs of row and key that attention may use: the same request, not the future, and nothing before the "
        "window."
    ),
    "packed batch": "A batch without padding: the rows of all requests one after another.",
    "pool": "All KV blocks. Its size bounds how many tokens can be in progress.",
    "preemption": "A running request loses its blocks because the pool is full, waits, and is recomputed.",
    "prefill": "Computing the prompt of a request, in one chunk or several.",
    "prefix caching": "Blocks of an equal beginning are found and shared instead of recomputed.",
    "role": (
        "The part that a chunk plays in its request, which decides whether it samples: decode, whole "
        "prompt, part of a prompt or last chunk. The field is arm."
    ),
    "row": "One token in the packed batch.",
    "sampling": "Choosing the next token from the logits.",
    "scheduler": "Chooses the tokens of each step, and allocates blocks for them.",
    "seat": "A place among the running requests; there are max_num_seqs.",
    "slot": "The place of one token in the pool: block number times block_size, and the offset in the block.",
    "step": "One decision of the scheduler and one forward pass.",
    "trace": "The records of all steps of a run: live, simulated, or from vLLM.",
    "TTFT": "Time to first token: from the arrival of a request to its first output token.",
}

SECOND_NAMES: dict[str, str] = {
    "KV page": "block",
    "page table": "block table",
    "block map": "block table",
    "iteration budget": "budget",
    "prompt phase": "prefill",
    "generation phase": "decode",
    "prompt cache": "prefix caching",
    "in-flight batching": "continuous batching",
    "swapped out": "preemption",
    "first word": "first token",
}
"""Other people's names of these words, which views and pages do not use."""
