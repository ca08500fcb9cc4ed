"""The content of the simulated second tier against the manager of vLLM's offloading to host memory."""

import importlib.util
import random

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm", allow_module_level=True)

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from workbench.scheduler.second_tier import SecondTier

LIMITS = {"kv_bytes_per_token": 1e5, "bandwidth": 1e9, "latency": 0.0}


def conversations(rng):
    """The blocks of requests, one request after another, of conversations that grow, end and begin alike."""
    said = [[] for _ in range(6)]
    fresh = 0
    for _ in range(300):
        user = rng.randrange(6)
        if not said[user] or len(said[user]) > 30:
            said[user] = list(rng.choice(said)[: rng.randrange(4)])
        more = rng.randrange(1, 6)
        said[user] = [*said[user], *range(fresh, fresh + more)]
        fresh += more
        yield [b"%08d" % block for block in said[user]]


def serve(manager, name, digests):
    """The number of blocks that vLLM finds for a request, which loads them, stores the others, and ends."""
    context, keys = ReqContext(req_id=name), [make_offload_key(digest, 0) for digest in digests]
    for place, key in enumerate(keys):
        context.set_offload_key_position(key, place + 1)
    manager.on_new_request(context)
    found = 0
    while found < len(keys) and manager.lookup(keys[found], context) is LookupResult.HIT:
        found += 1
    if found:
        manager.prepare_load(keys[:found], context)
        manager.complete_load(keys[:found], context)
    output = manager.prepare_store(keys[found:], context)
    manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)
    return found


@pytest.mark.parametrize("capacity", [40, 60, 100])
def test_it_keeps_what_vllm_keeps(capacity):
    rng, num_found, num_lost = random.Random(capacity), 0, 0
    tier, manager, seen = SecondTier({"num_blocks": capacity, **LIMITS}, 16), CPUOffloadingManager(capacity), set()
    for index, digests in enumerate(conversations(rng)):
        ours = tier.num_kept(digests)
        tier.use(digests)  # as when a load begins
        for digest in digests[ours:]:
            tier.store(digest)
        tier.use(digests)
        assert serve(manager, f"r{index}", digests) == ours, index
        num_found += ours
        num_lost += sum(digest in seen for digest in digests[ours:])
        seen.update(digests)
    assert num_found > 300 and num_lost > 50  # much is found, and much had to go
