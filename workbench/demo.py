"""The demo: a real model serving real requests, seen step by step."""

from __future__ import annotations

import pydoc_data.topics
import sys
import threading
import time
from typing import TYPE_CHECKING

from workbench.engine.config import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workbench.engine.engine import Engine
    from workbench.trace import StepRecord

CONFIG = EngineConfig(max_num_batched_tokens=256, max_num_seqs=16, block_size=16, num_blocks=512)

# The step before which each request arrives: a long prompt first, short ones while it prefills.
ARRIVALS = {0: ("long", "strings"), 1: ("lists",), 2: ("while", "import"), 3: ("lambda",), 5: ("assert",), 8: ("pass",)}
SHORT_PROMPT_CHARACTERS = 320
LONG_PROMPT_TOKENS = 1500


def demo_requests(engine: Engine) -> Iterator[tuple[int, str, list[int], SamplingParams]]:
    """The demo's requests as (arrival step, request id, prompt token ids, sampling).

    The texts are Python's own documentation (``pydoc_data.topics``), which every Python has.
    """
    topics = pydoc_data.topics.topics
    long_text = engine.tokenizer.encode(topics["specialnames"])[:LONG_PROMPT_TOKENS]
    available = iter(sorted(topics, key=len, reverse=True))
    for step, names in ARRIVALS.items():
        for name in names:
            if name == "long":
                yield step, "long", long_text, SamplingParams(max_tokens=24)
                continue
            text = topics.get(name) or topics[next(available)]
            yield step, name, engine.tokenizer.encode(text[:SHORT_PROMPT_CHARACTERS]), SamplingParams(max_tokens=40)


def describe(step: StepRecord) -> str:
    """One line per step: what was packed, what waited, what it took."""
    prefill = ", ".join(f"{c.request_id}[{c.start}:{c.end}]" for c in step.chunks if c.arm != "decode")
    decodes = sum(c.arm == "decode" for c in step.chunks)
    parts = [f"{step.num_tokens:4d} tokens", f"{decodes} decode" + ("s" if decodes != 1 else "")]
    if prefill:
        parts.append(f"prefill {prefill}")
    for label, names in (("preempted", step.preempted), ("finished", step.finished)):
        if names:
            parts.append(f"{label} {', '.join(names)}")
    return f"step {step.step:3d}  {sum(step.timings.values()) * 1000:6.0f} ms  " + " | ".join(parts)


def drive(engine: Engine, say=print) -> None:
    """Add each request when its step comes, take every step and print its line, until all have ended."""
    pending = list(demo_requests(engine))
    while True:
        while pending and pending[0][0] <= engine.scheduler.step:
            _, request_id, prompt, sampling = pending.pop(0)
            engine.add_request(prompt, sampling, request_id=request_id)
        step = engine.step()
        if step is not None:
            say(describe(step))
        elif not pending:
            return


def run_headless(model: str) -> int:
    """Run the demo's requests, print every text and a summary; the exit status."""
    from workbench.engine.engine import Engine

    engine = Engine(model, CONFIG)
    print(engine, flush=True)
    drive(engine, lambda line: print(line, flush=True))
    for output in engine.outputs.values():
        print(f"\n{output.request_id} ({len(output.prompt_token_ids)} prompt tokens, {output.finish_reason}):")
        print("  " + output.text.strip().replace("\n", "\n  "))
    print("\n" + str(engine.trace.metrics()))
    failed = [output.request_id for output in engine.outputs.values() if output.finish_reason == "error"]
    engine.close()
    return 1 if failed else 0


def run_served(model: str, port: int) -> int:
    """Serve the dashboard over a running engine until Ctrl-C; the exit status."""
    from workbench.engine.engine import Engine
    from workbench.viz.app import serve

    engine = Engine(model, CONFIG)
    print(engine, flush=True)

    def run_requests() -> None:
        time.sleep(1.0)  # let a browser that is already waiting see the first step
        drive(engine, lambda line: print(line, flush=True))
        print("all requests have ended; add one in the page, or press Ctrl-C to stop", flush=True)

    threading.Thread(target=run_requests, name="demo-requests", daemon=True).start()
    print(f"dashboard: http://127.0.0.1:{port}", flush=True)
    try:
        serve(engine, port=port, title="Workbench")
    except KeyboardInterrupt:
        pass
    finally:
        engine.close()
    print("stopped", file=sys.stderr)
    return 0
