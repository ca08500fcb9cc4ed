"""The workloads and the policies that the playground offers. All of them are plain data, equal on every machine."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

CLOCK = {"fixed": 0.012, "per_sequence": 0.0002, "per_prefill_token": 0.00008, "per_kv_token": 2e-7}
"""Cost model of the presets: a step of one decode takes 12 ms, 1,000 prompt tokens add 80 ms."""

Requests = list[dict[str, Any]]


class Preset(NamedTuple):
    """A workload of the playground.

    Attributes:
        title: Its name in the list.
        hint: A sentence about the thing to look for.
        workload: The workload, in the format of ``workbench.simulation.workload``.
    """

    title: str
    hint: str
    workload: dict[str, Any]


def _timed(rng: random.Random, number: int, rate: float) -> list[float]:
    """Arrival times in seconds, ``rate`` per second on average."""
    now, times = 0.0, []
    for _ in range(number):
        now += rng.expovariate(rate)
        times.append(round(now, 3))
    return times


def _chunked() -> dict[str, Any]:
    requests = [
        {"id": "chat", "prompt": {"len": 5}, "max_tokens": 60},
        {"id": "long", "prompt": {"len": 2000}, "max_tokens": 4, "arrival_time": 0.06},
    ]
    return {"config": {"max_num_batched_tokens": 512, "num_blocks": 512}, "cost_model": CLOCK, "requests": requests}


def _partial_prefills() -> dict[str, Any]:
    requests: Requests = [{"id": f"long{i}", "prompt": {"len": 1500}, "max_tokens": 8} for i in range(3)]
    requests += [
        {"id": f"short{i}", "prompt": {"len": 30}, "max_tokens": 8, "arrival_time": round(0.04 + 0.18 * i, 3)}
        for i in range(4)
    ]
    config = {"max_num_batched_tokens": 128, "num_blocks": 1024, "enable_prefix_caching": False}
    return {"config": config, "cost_model": CLOCK, "requests": requests}


def _preemption() -> dict[str, Any]:
    requests = [
        {"id": f"r{i}", "prompt": {"len": 40 + 11 * i}, "max_tokens": 60, "arrival_time": round(0.03 * i, 3)}
        for i in range(8)
    ]
    config = {"max_num_batched_tokens": 128, "max_num_seqs": 8, "num_blocks": 40}
    return {"config": config, "cost_model": CLOCK, "requests": requests}


def _prefix_caching() -> dict[str, Any]:
    requests = [
        {
            "id": f"q{i}",
            "prompt": {"parts": [{"len": 400, "seed": "common"}, {"len": 30, "seed": f"q{i}"}]},
            "max_tokens": 8,
            "arrival_time": round(0.05 * i, 3),
        }
        for i in range(20)
    ]
    config = {"max_num_batched_tokens": 256, "num_blocks": 256}
    return {"config": config, "cost_model": CLOCK, "requests": requests}


def _bursts() -> dict[str, Any]:
    rng = random.Random(3)
    requests = [
        {
            "id": f"b{burst}.{i}",
            "prompt": {"len": rng.randint(40, 400)},
            "max_tokens": rng.randint(8, 48),
            "arrival_time": round(0.9 * burst + 0.001 * i, 3),
        }
        for burst in range(4)
        for i in range(10)
    ]
    config = {"max_num_batched_tokens": 512, "max_num_seqs": 8, "num_blocks": 512}
    return {"config": config, "cost_model": CLOCK, "requests": requests}


def _documents() -> dict[str, Any]:
    rng = random.Random(5)
    requests: Requests = [
        {
            "id": f"chat{i}",
            "prompt": {"len": rng.randint(15, 60)},
            "max_tokens": rng.randint(16, 40),
            "arrival_time": at,
        }
        for i, at in enumerate(_timed(rng, 24, 10.0))
    ]
    requests += [
        {"id": f"document{i}", "prompt": {"len": rng.randint(2500, 4000)}, "max_tokens": 12, "arrival_time": at}
        for i, at in enumerate((0.3, 0.9, 1.5))
    ]
    config = {"max_num_batched_tokens": 1024, "max_num_seqs": 16, "num_blocks": 1024}
    return {"config": config, "cost_model": CLOCK, "requests": requests}


def _agents() -> dict[str, Any]:
    """Each agent's next prompt is its conversation so far, so all of it but the newest turn can come from the cache."""
    rng = random.Random(7)
    requests: Requests = []
    for agent in range(5):
        parts = [{"len": 320, "seed": "tools"}]
        for turn in range(5):
            parts = [*parts, {"len": rng.randint(40, 160), "seed": f"agent{agent} turn{turn}"}]
            requests.append(
                {
                    "id": f"agent{agent}.{turn}",
                    "prompt": {"parts": parts},
                    "max_tokens": rng.randint(10, 30),
                    "arrival_time": round(0.15 * agent + 0.8 * turn + 0.1 * rng.random(), 3),
                }
            )
    config = {"max_num_batched_tokens": 512, "max_num_seqs": 8, "num_blocks": 320}
    return {"config": config, "cost_model": CLOCK, "requests": requests}


def _own_policy() -> dict[str, Any]:
    rng = random.Random(5)
    lengths = [rng.randint(600, 1200) if rng.random() < 0.25 else rng.randint(10, 60) for _ in range(40)]
    requests = [
        {"id": f"r{i}", "prompt": {"len": length}, "max_tokens": 12, "arrival_time": round(0.04 * i, 3)}
        for i, length in enumerate(lengths)
    ]
    config = {"max_num_batched_tokens": 128, "max_num_seqs": 4, "num_blocks": 1024, "enable_prefix_caching": False}
    return {"config": config, "cost_model": CLOCK, "requests": requests}


def _two_hundred() -> dict[str, Any]:
    rng = random.Random(11)
    requests = [
        {
            "id": f"r{i}",
            "prompt": {"len": min(2000, max(8, int(rng.lognormvariate(4.8, 0.9))))},
            "max_tokens": rng.randint(4, 40),
            "arrival_time": at,
        }
        for i, at in enumerate(_timed(rng, 200, 40.0))
    ]
    config = {"max_num_batched_tokens": 512, "max_num_seqs": 32, "num_blocks": 1024}
    return {"config": config, "cost_model": CLOCK, "requests": requests}


PRESETS = {
    "chunked": Preset(
        "Course 04: a chat and a long prompt",
        "Lower the token budget: the pauses of the chat get shorter, and the long prompt waits longer.",
        _chunked(),
    ),
    "partial-prefills": Preset(
        "Course 06: three long prompts and short ones",
        "Short prompts wait behind long ones. Limit long partial prefills to 1 and partial prefills to 4.",
        _partial_prefills(),
    ),
    "preemption": Preset(
        "Course 07: too few KV blocks",
        "Requests lose their blocks and are computed again. How many blocks are enough?",
        _preemption(),
    ),
    "prefix-caching": Preset(
        "Course 08: a shared prefix",
        "Twenty questions about one text. Turn prefix caching off and compare the computed tokens.",
        _prefix_caching(),
    ),
    "own-policy": Preset(
        "Course 11: who goes first?",
        "Choose another policy, or write one: the mean time to the first token drops, and the long prompts pay.",
        _own_policy(),
    ),
    "bursts": Preset(
        "Bursts",
        "Ten requests at once, four times. More seats shorten the queue and lengthen the steps.",
        _bursts(),
    ),
    "documents": Preset(
        "Long documents among short questions",
        "Each document stops the chats for a while. A chunk cap or a smaller budget shares the steps.",
        _documents(),
    ),
    "agents": Preset(
        "Agents",
        "Five agents whose prompts grow with every turn. A smaller pool evicts what the next turn needs.",
        _agents(),
    ),
    "two-hundred": Preset(
        "200 requests",
        "Prompts of realistic lengths, 40 requests per second.",
        _two_hundred(),
    ),
}
"""The workloads by their name in links."""

POLICIES = {
    "ShortestFirst": '''\
class ShortestFirst(SchedulingPolicy):
    """The waiting request with the least work goes first."""

    def waiting_order(self, view):
        return sorted(view.waiting, key=view.num_left)
''',
    "Aging": '''\
class Aging(SchedulingPolicy):
    """Fewest tokens first, and a step of waiting counts as much as some tokens."""

    tokens_per_step = 10

    def waiting_order(self, view):
        return sorted(
            view.waiting,
            key=lambda r: view.num_left(r) + self.tokens_per_step * r.arrival_step,
        )
''',
    "FewestComputed": '''\
class FewestComputed(SchedulingPolicy):
    """The request that loses the least work is preempted."""

    def victim(self, view):
        return min(view.victims, key=lambda r: r.num_kv_computed)
''',
}
"""The three policies of notebook 11, as source."""
