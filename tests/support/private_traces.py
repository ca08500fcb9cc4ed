"""Recordings without token ids, made from traces that have them."""

from msgspec import UNSET
from msgspec.structs import replace

from workbench.trace import Supplement, Trace
from workbench.trace.readings.contents import HASHES
from workbench.trace.recorders.block_hashes import BlockHasher
from workbench.trace.recorders.messages import Arrival

KEY = b"the key of a test"


def without_tokens(trace, *, hashes=True, key=KEY):
    """The trace as a recording without token ids has it: with hashes of its blocks, or without those too.

    Hashes that a recorder made are kept; a simulation gets some.
    """
    made = trace.meta.prefix_hashes
    hasher = None
    if hashes and not made:
        hasher = BlockHasher(key, trace.meta, _lookahead(trace))
        made = hasher.described
    config = {**trace.config, "token_ids_recorded": False}
    bare = Trace(replace(trace.meta, config=config, prefix_hashes=made if hashes else UNSET))
    outputs = {}
    for info in trace.requests.values():
        prompt = info.prompt_token_ids
        if hasher is not None:
            arrival = Arrival(info.request_id, len(prompt), 1, 0, 0.0, 0.0, list(prompt), info.cache_salt)
            info = replace(info, block_hashes=hasher.begin(arrival))
        bare.add_request(replace(info, prompt_token_ids=(), block_hashes=info.block_hashes if hashes else ""))
        outputs[info.request_id] = []
    for record in trace:
        for chunk in record.chunks:
            outputs[chunk.request_id] += chunk.accepted
        bare.append(replace(record, chunks=tuple(map(_bare, record.chunks))))
        if hasher is not None and (ended := (*record.finished, *record.aborted)):
            facts = {name: hasher.end(name, outputs[name]) for name in ended}
            bare.add_supplement(Supplement(record.step, HASHES, facts))
    for supplement in trace.supplements if hashes else ():
        bare.add_supplement(supplement)
    bare.end = trace.end
    return bare


def _bare(chunk):
    return replace(
        chunk,
        sampled=None if chunk.sampled is None else 0,
        sampled_before=(0,) * len(chunk.sampled_before),
        drafts=(-1,) * len(chunk.drafts),
    )


def _lookahead(trace):
    from workbench.analysis.fork import recorded_config

    return recorded_config(trace).speculation.num_hash_lookahead_tokens
