"""Traces for the tests of the views: random workloads through the real scheduler, and a controller that replays."""

import random
import re
import threading
from base64 import b64decode

from workbench import simulate
from workbench.trace import RequestInfo, StepRecord, Trace, TraceMeta
from workbench.trace.readings.breakpoints import Breakpoints
from workbench.trace.reasons import Reason
from workbench.trace.records import Chunk, KernelLaunch, WorkItem

HOSTILE_TEXTS = (
    "<script>window.pwned = 1</script>",
    "</textarea></script><img src=x onerror='window.pwned = 1'>",
    "\u202eright-to-left\u202c \u05e9\u05dc\u05d5\u05dd",
    "x" * 10_000,
    "&lt;b&gt; \" ' ` ${1+1} \x00 😀",
)


def workload(seed=0, num_requests=10, num_blocks=120, **config):
    """A mixed workload: long and short prompts, shared prefixes, a small pool, so that preemptions happen."""
    rng = random.Random(seed)
    shared = {"len": 32, "seed": "shared"}
    requests = []
    for i in range(num_requests):
        length = rng.choice((5, 17, 40, 90, 300))
        prompt = {"parts": [shared, {"len": length, "seed": f"p{i}"}]} if rng.random() < 0.4 else {"len": length}
        requests.append(
            {"id": f"r{i}", "prompt": prompt, "max_tokens": rng.randint(1, 24), "arrival_step": rng.randint(0, 12)}
        )
    return {
        "config": {
            "max_num_batched_tokens": rng.choice((24, 64, 256)),
            "max_num_seqs": rng.choice((3, 8)),
            "block_size": rng.choice((4, 16)),
            "num_blocks": num_blocks,
            "enable_prefix_caching": rng.random() < 0.7,
            "scheduler_reserve_full_isl": rng.random() < 0.5,
            **config,
        },
        "requests": requests,
    }


def random_trace(seed, **options):
    return simulate(workload(seed, **options), max_steps=400)


IMAGE = "data:image/svg+xml;base64,"


def pictures(html):
    """The SVG files that HTML shows as images."""
    return [b64decode(value).decode() for value in re.findall(f'src="{re.escape(IMAGE)}([^"]*)"', html)]


def hostile_trace(texts=HOSTILE_TEXTS):
    """A trace of one request with hostile strings in every text field."""
    trace = Trace(
        TraceMeta(source=HOSTILE_TEXTS[0], config={"block_size": 4, "num_blocks": 40}, model={"name": HOSTILE_TEXTS[1]})
    )
    name = HOSTILE_TEXTS[0]
    trace.add_request(RequestInfo(name, 3, prompt_token_ids=(1, 2, 3), prompt=HOSTILE_TEXTS[1], max_tokens=40))
    start = 0
    for step, text in enumerate(texts):
        size = 3 if step == 0 else 1
        held = -(-start // 4)
        needed = -(-(start + size) // 4)
        chunk = Chunk(
            name,
            start,
            size,
            False,
            "decode" if step else "new_final",
            7 + step,
            "complete",
            new_block_ids=tuple(range(1 + held, 1 + needed)),
            text=text,
        )
        start += size
        work = (WorkItem(0, 0, size, 0, start),)
        trace.append(
            StepRecord(
                step,
                time=step * 0.5,
                chunks=(chunk,),
                arrived=(name,) if step == 0 else (),
                admitted=(name,) if step == 0 else (),
                running=(name,),
                free_blocks=39 - needed,
                free_blocks_end=39 - needed,
                token_budget=8,
                timings={"forward": 0.25},
                waiting_reason=Reason(text=HOSTILE_TEXTS[2]),
                kernel=KernelLaunch(
                    "cpu", block_q=4, num_heads=2, num_kv_heads=1, head_dim=8, dtype="float32", work_items=work
                ),
            )
        )
    return trace


class ReplayingController:
    """A controller whose engine appends the steps of a recorded trace, one per ``step``, on a separate thread."""

    name = "replay"

    def __init__(self, recorded, seconds_per_step=0.0):
        self.recorded = recorded
        self.trace = Trace(recorded.meta)
        for info in recorded.requests.values():
            self.trace.add_request(info)
        self.seconds_per_step = seconds_per_step
        self.added = []
        self.aborted = []
        self.listeners = []
        self.breakpoints = Breakpoints()
        self._running = threading.Event()
        self._stop = threading.Event()
        self._thread = None

    @property
    def state(self):
        if self._running.is_set():
            return "running"
        return "idle" if len(self.trace) == len(self.recorded) else "paused"

    def step(self):
        if len(self.trace) == len(self.recorded):
            return None
        record = self.recorded[len(self.trace)]
        self.trace.append(record)
        for listener in list(self.listeners):
            listener(record)
        if self.breakpoints.check(record):
            self._stop.set()
        return record

    def start(self):
        self._stop.clear()
        self._running.set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._stop.wait(self.seconds_per_step) and self.step() is not None:
            pass
        self._running.clear()

    def pause(self):
        self._stop.set()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join()

    def on_step(self, listener):
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def add_request(self, prompt, **params):
        if not prompt:
            raise ValueError("prompt must not be empty")
        if prompt == "too much":
            raise ValueError("prompt must not be too much")
        self.added.append((prompt, params))
        return f"added{len(self.added)}"

    def abort(self, request_id):
        self.aborted.append(request_id)


def requests_in_time(max_num_batched_tokens):
    """Twenty requests, of which a larger budget changes a few; the others' latencies are other sums of equal steps."""
    requests = [
        {"id": f"r{i}", "prompt": {"len": 30 + 17 * (i % 7), "seed": "ABC"[i % 3]}, "max_tokens": 8 + i % 9}
        for i in range(20)
    ]
    for i, request in enumerate(requests):
        request["arrival_time"] = 0.02 * i
    config = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": 8, "num_blocks": 60, "block_size": 16}
    cost_model = {"fixed": 0.01, "per_prefill_token": 0.0002}
    return simulate({"config": config, "cost_model": cost_model, "requests": requests})
