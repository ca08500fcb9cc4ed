"""The workloads and the policies that the playground offers. All of them are plain data, equal on every machine."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any, NamedTuple

CLOCK = {"fixed": 0.012, "per_sequence": 0.0002, "per_prefill_token": 0.00008, "per_kv_token": 2e-7}
"""Cost model of the presets: a step of one decode takes 12 ms, 1,000 prompt tokens add 80 ms."""

Request = dict[str, Any]


class Preset(NamedTuple):
    """A workload of the playground.

    Attributes:
        title: Its name in the list.
        hint: A sentence about the thing to look for.
        workload: The workload, in the format of ``workbench.simulation.workload``.
        shows: Its subject, of `workbench.apps.playground.run.MOMENTS`: the page opens at the first such step.
        replicas: Number of replicas that serve it; a router sends the requests to several.
    """

    title: str
    hint: str
    workload: dict[str, Any]
    shows: str
    replicas: int = 1


def _preset(title: str, hint: str, shows: str, requests: list[Request], **config: Any) -> Preset:
    return Preset(title, hint, {"config": config, "cost_model": CLOCK, "requests": requests}, shows)


def _request(name: str, prompt: int | list[Request], max_tokens: int, at: float | None = None) -> Request:
    """A request whose prompt is a number of tokens or a list of parts, and which arrives at a time in seconds."""
    arrival = {} if at is None else {"arrival_time": round(at, 3)}
    length = {"parts": prompt} if isinstance(prompt, list) else {"len": prompt}
    return {"id": name, "prompt": length, "max_tokens": max_tokens} | arrival


def _times(rng: random.Random, number: int, rate: float) -> list[float]:
    """Arrival times in seconds, ``rate`` per second on average."""
    return list(accumulate(rng.expovariate(rate) for _ in range(number)))


def _chats_and_documents() -> list[Request]:
    rng = random.Random(5)
    chats = [
        _request(f"chat{i}", rng.randint(15, 60), rng.randint(16, 40), at) for i, at in enumerate(_times(rng, 24, 10.0))
    ]
    return chats + [_request(f"document{i}", rng.randint(2500, 4000), 12, at) for i, at in enumerate((0.3, 0.9, 1.5))]


def _bursts() -> list[Request]:
    rng = random.Random(3)
    return [
        _request(f"b{burst}.{i}", rng.randint(40, 400), rng.randint(8, 48), 0.9 * burst + 0.001 * i)
        for burst in range(4)
        for i in range(10)
    ]


def _agents() -> list[Request]:
    """Each agent's next prompt is its conversation so far, so all of it but the newest turn can come from the cache."""
    rng = random.Random(7)
    requests = []
    for agent in range(5):
        parts: list[Request] = [{"len": 320, "seed": "tools"}]
        for turn in range(5):
            parts = [*parts, {"len": rng.randint(40, 160), "seed": f"agent{agent} turn{turn}"}]
            output, at = rng.randint(10, 30), 0.15 * agent + 0.8 * turn + 0.1 * rng.random()
            requests.append(_request(f"agent{agent}.{turn}", parts, output, at))
    return requests


def _conversations() -> list[Request]:
    """Users who ask again with all that was said before: only the replica that served them has it in its cache."""
    rng = random.Random(13)
    requests = []
    for user in range(16):
        parts: list[Request] = [{"len": 256, "seed": "system"}]
        at = 0.12 * user
        for turn in range(5):
            parts = [*parts, {"len": rng.randint(80, 400), "seed": f"user{user} turn{turn}"}]
            session = {"session": f"user{user}"}
            requests.append(_request(f"user{user}.{turn}", parts, rng.randint(12, 40), at) | session)
            at += 0.5 + rng.random()
    return requests


def _few_long_ones() -> list[Request]:
    rng = random.Random(5)
    lengths = [rng.randint(600, 1200) if rng.random() < 0.25 else rng.randint(10, 60) for _ in range(40)]
    return [_request(f"r{i}", length, 12, 0.04 * i) for i, length in enumerate(lengths)]


def _realistic() -> list[Request]:
    rng = random.Random(11)
    return [
        _request(f"r{i}", min(2000, max(8, int(rng.lognormvariate(4.8, 0.9)))), rng.randint(4, 40), at)
        for i, at in enumerate(_times(rng, 200, 40.0))
    ]


PRESETS = {
    "chunked": _preset(
        "Course 04: a chat and a long prompt",
        "Lower the token budget: the pauses of the chat get shorter, and the long prompt waits longer.",
        "a chunk beside decodes",
        [_request("chat", 5, 60), _request("long", 2000, 4, 0.06)],
        max_num_batched_tokens=512,
        num_blocks=512,
    ),
    "partial-prefills": _preset(
        "Course 06: three long prompts and short ones",
        "Short prompts wait behind long ones. Limit long partial prefills to 1 and partial prefills to 4.",
        "a request waits",
        [_request(f"long{i}", 1500, 8) for i in range(3)]
        + [_request(f"short{i}", 30, 8, 0.04 + 0.18 * i) for i in range(4)],
        max_num_batched_tokens=128,
        num_blocks=1024,
        enable_prefix_caching=False,
    ),
    "preemption": _preset(
        "Course 07: too few KV blocks",
        "Requests lose their blocks and are recomputed. How many blocks are enough?",
        "a preemption",
        [_request(f"r{i}", 40 + 11 * i, 60, 0.03 * i) for i in range(8)],
        max_num_batched_tokens=128,
        max_num_seqs=8,
        num_blocks=40,
    ),
    "prefix-caching": _preset(
        "Course 08: a shared prefix",
        "Twenty questions about one text. Turn prefix caching off and compare the computed tokens.",
        "a hit in the prefix cache",
        [
            _request(f"q{i}", [{"len": 400, "seed": "common"}, {"len": 30, "seed": f"q{i}"}], 8, 0.05 * i)
            for i in range(20)
        ],
        max_num_batched_tokens=256,
        num_blocks=256,
    ),
    "own-policy": _preset(
        "Course 11: who goes first?",
        "Choose another policy, or write one: the mean time to the first token drops, and the long prompts pay.",
        "a request waits",
        _few_long_ones(),
        max_num_batched_tokens=128,
        max_num_seqs=4,
        num_blocks=1024,
        enable_prefix_caching=False,
    ),
    "bursts": _preset(
        "Bursts",
        "Ten requests at once, four times. More seats shorten the queue and lengthen the steps.",
        "a request waits",
        _bursts(),
        max_num_batched_tokens=512,
        max_num_seqs=8,
        num_blocks=512,
    ),
    "documents": _preset(
        "Long documents among short questions",
        "Each document stops the chats for a while. A chunk cap or a smaller budget shares the steps.",
        "a chunk beside decodes",
        _chats_and_documents(),
        max_num_batched_tokens=1024,
        max_num_seqs=16,
        num_blocks=1024,
    ),
    "agents": _preset(
        "Agents",
        "Five agents whose prompts grow with every turn. A pool of 128 KV blocks evicts what the next turn needs.",
        "a hit in the prefix cache",
        _agents(),
        max_num_batched_tokens=512,
        max_num_seqs=8,
        num_blocks=320,
    ),
    "fleet": _preset(
        "A fleet: conversations and a router",
        "Pin round_robin as A and bet on sticky: does it find a conversation's cache? Then bet on cache_aware, and see "
        "where its requests go.",
        "a hit in the prefix cache",
        _conversations(),
        max_num_batched_tokens=512,
        max_num_seqs=16,
        num_blocks=512,
    )._replace(replicas=4),
    "two-hundred": _preset(
        "200 requests",
        "Prompts of realistic lengths, 40 requests per second.",
        "a request waits",
        _realistic(),
        max_num_batched_tokens=512,
        max_num_seqs=32,
        num_blocks=1024,
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
