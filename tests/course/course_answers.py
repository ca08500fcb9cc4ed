"""A right answer to every exercise of the course, and three wrong ones that people give."""

from kernel_answers import RIGHT, WRONG

RIGHT_MASK = """\
def block_diagonal_mask(cu_seqlens_q, seqused_k):
    mask = np.zeros((cu_seqlens_q[-1], sum(seqused_k)), dtype=bool)
    column = 0
    for i, keys in enumerate(seqused_k):
        begin, end = cu_seqlens_q[i], cu_seqlens_q[i + 1]
        for row in range(begin, end):
            mask[row, column : column + keys - (end - 1 - row)] = True
        column += keys
    return mask
"""
FIND = """\
def find_seq_idx(cu_seqlens_q, row):
    low, high = 0, len(cu_seqlens_q) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if cu_seqlens_q[middle] <= row:
            low = middle
        else:
            high = middle
    return low
"""
CHUNKS = """\
def chunks_of(num_prompt_tokens, token_budget, num_decodes):
    room = token_budget - num_decodes
    return [(start, min(start + room, num_prompt_tokens)) for start in range(0, num_prompt_tokens, room)]
"""
VICTIM = """\
def victim_of(running, policy):
    if policy == "fcfs":
        return running[-1][0]
    least = max(priority for _, priority in running)
    return [name for name, priority in running if priority == least][-1]
"""
TOKEN = """\
def token_of(probabilities, number):
    total = 0.0
    for token, probability in enumerate(probabilities):
        total += probability
        if number < total:
            return token
"""
STANDS_STILL = """\
def stands_still():
    sampled = set()
    def condition(record):
        stands = any(name in sampled and name not in record.num_kv_computed for name in record.running)
        sampled.update(chunk.request_id for chunk in record.chunks if chunk.sampled is not None)
        return stands
    return condition
"""
POLICY = """\
class FewestComputed(SchedulingPolicy):
    def victim(self, view):
        return {}
"""
KEPT = """\
def tokens_kept(drafts, model_tokens):
    kept = []
    for draft, token in zip(drafts, model_tokens):
        kept.append(token)
        if draft != token:
            return kept
    return kept + [model_tokens[len(drafts)]]
"""
REPAIR = 'letter = "F"\ncode = course.code_of(letter).replace("> request.max_num_tokens", "{} request.max_num_tokens")'
EVICTION = """\
class Mine(Lru):
    def __init__(self):
        super().__init__()
        self.hits = {{}}

    def hit(self, block, digest):
        self.hits[digest] = self.hits.get(digest, 0) + 1

    def victim(self):
        return {}
"""


def _function(signature: str, *results: str) -> tuple[str, ...]:
    return tuple(f"def {signature}:\n    return {result}\n" for result in results)


ANSWERS: dict[str, tuple[str, ...]] = {
    "steps": tuple(f"my_answer = {number}" for number in (7, 6, 8, None)),
    "mask": (
        RIGHT_MASK,
        RIGHT_MASK.replace("- (end - 1 - row)", ""),
        RIGHT_MASK.replace("column + keys - (end - 1 - row)", "column + row - begin + 1"),
        RIGHT_MASK.replace("column = 0\n", "column = 0\n    seqused_k = np.diff(cu_seqlens_q)\n"),
    ),
    "slots": _function(
        "slot_of(block_table, position, block_size)",
        "block_table[position // block_size] * block_size + position % block_size",
        "block_table[0] * block_size + position",
        "block_table[position // block_size] + position % block_size",
        "block_table[position % block_size] * block_size + position // block_size",
    ),
    "find_seq_idx": (
        FIND,
        FIND.replace("<= row", "< row"),
        FIND.replace("return low", "return high"),
        "def find_seq_idx(cu_seqlens_q, row):\n    return sum(start <= row for start in cu_seqlens_q) - 1",
    ),
    "chunks": (
        CHUNKS,
        CHUNKS.replace(" - num_decodes", ""),
        CHUNKS.replace("min(start + room, num_prompt_tokens)", "start + room"),
        CHUNKS.replace("min(start + room, num_prompt_tokens)", "min(room, num_prompt_tokens - start)"),
    ),
    "recomputed": _function(
        "rows_from_position_zero(num_tokens, chunk)",
        "sum(min(end, num_tokens) for end in range(chunk, num_tokens + chunk, chunk))",
        "num_tokens * -(-num_tokens // chunk)",
        "sum(range(chunk, num_tokens + chunk, chunk))",
        "num_tokens * num_tokens // (2 * chunk)",
    ),
    "knobs": (
        "my_knobs = dict(max_num_partial_prefills=2, max_long_partial_prefills=1, long_prefill_token_threshold=100)",
        'my_knobs = {"max_num_partial_prefills": 2}',
        'my_knobs = {"max_num_batched_tokens": 64}',
        'my_knobs = {"max_partial_prefills": 2}',
    ),
    "victim": (
        VICTIM,
        VICTIM.replace("max(", "min("),
        VICTIM.replace("== least][-1]", "== least][0]"),
        VICTIM.replace("running[-1][0]", "running[0][0]"),
    ),
    "cached_tokens": _function(
        "cached_tokens(num_shared, num_prompt_tokens, block_size)",
        "min(num_shared, num_prompt_tokens - 1) // block_size * block_size",
        "num_shared // block_size * block_size",
        "min(num_shared, num_prompt_tokens - 1)",
        "num_shared // block_size",
    ),
    "token_of": (
        TOKEN,
        TOKEN.replace("number < total", "number < probability"),
        TOKEN.replace("return token", "return token + 1"),
        "def token_of(probabilities, number):\n    return int(np.argmax(probabilities))",
    ),
    "standstill": (
        STANDS_STILL,
        STANDS_STILL.replace("name in sampled and ", ""),
        STANDS_STILL.replace("not in record.num_kv_computed", "in record.num_kv_computed"),
        STANDS_STILL.replace("record.running", "record.waiting"),
    ),
    "fewest_computed": tuple(
        POLICY.format(result)
        for result in (
            "min(view.victims, key=lambda request: request.num_kv_computed)",
            "max(view.victims, key=lambda request: request.num_kv_computed)",
            "view.victims[0]",
            "min(view.victims, key=lambda request: request.request_id).request_id",
        )
    ),
    "smallest_budget": tuple(f"my_answer = {number}" for number in (203, 202, 204, 256)),
    "tokens_kept": (
        KEPT,
        KEPT.replace("if draft != token", "if draft == token"),
        KEPT.replace("return kept + [model_tokens[len(drafts)]]", "return kept"),
        "def tokens_kept(drafts, model_tokens):\n    return [d for d, t in zip(drafts, model_tokens) if d == t]",
    ),
    "num_chunks": _function(
        "num_chunks(num_tokens, ends_by_stop_token)",
        "num_tokens + ends_by_stop_token",
        "num_tokens",
        "num_tokens + 1",
        "num_tokens - 1 + ends_by_stop_token",
    ),
    "first_block": _function(
        "first_block(num_computed, window, block_size)",
        "max(0, num_computed - window + 1) // block_size",
        "max(0, num_computed - window) // block_size",
        "(num_computed - window + 1) // block_size",
        "-(-max(0, num_computed - window + 1) // block_size)",
    ),
    "fewest_seats": tuple(f"my_answer = {number}" for number in (10, 9, 16, '"ten"')),
    "repair": (
        REPAIR.format(">="),
        REPAIR.format(">= -1 +"),
        REPAIR.format("<"),
        'letter = "F"\ncode = "def check_stop(:"',
    ),
    "could_differ": _function(
        "could_differ(logits, error)",
        "np.ptp(np.sort(logits)[-2:]) < 2 * error",
        "np.ptp(np.sort(logits)[-2:]) < error",
        "np.ptp(logits) < 2 * error",
        "np.ptp(np.sort(logits)[:2]) < 2 * error",
    ),
    "prompt_share": _function(
        "prompt_share(chunks, token_budget)",
        'sum(n for role, n in chunks if role != "decode") / token_budget',
        "sum(n for role, n in chunks) / token_budget",
        'sum(n for role, n in chunks if role != "decode") / sum(n for role, n in chunks)',
        'sum(n for role, n in chunks if role == "decode") / token_budget',
    ),
    "eviction": tuple(
        EVICTION.format(result)
        for result in (
            "min(self.released, key=lambda block: self.hits.get(self.released[block], 0))",
            "next(reversed(self.released))",
            "max(self.released, key=lambda block: self.hits.get(self.released[block], 0))",
            "None",
        )
    ),
}
"""By exercise: the right answer, then wrong ones."""

ANSWERS |= {
    f"kernel_{name}": tuple(f"{variable} = {source!r}" for source in (RIGHT[name], *(s for s, _ in WRONG[name][:3])))
    for name, variable in (
        ("guard", "guard_body"),
        ("pooling", "pooling_body"),
        ("online_softmax", "online_body"),
        ("paged_row", "row_body"),
    )
}
