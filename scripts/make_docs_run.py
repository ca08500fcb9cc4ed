"""Record the run that the documentation shows: ``python scripts/make_docs_run.py``.

A real run of the bundled model, with the things that the pages of the concepts explain: a long prompt in chunks, a
request that finds another's blocks, a pool that runs out, and tokens drawn at random with the candidates beside them.
"""

from __future__ import annotations

from pathlib import Path

from workbench import Engine, EngineConfig
from workbench.apps.demo import document

PATH = Path(__file__).parent.parent / "docs/data/run.jsonl.gz"

CONFIG = EngineConfig(max_num_batched_tokens=256, max_num_seqs=8, block_size=16, num_blocks=92, record_top_tokens=5)
RULES = "Answer in one short sentence. "
QUESTIONS = {
    1: {"paris": "What is the capital of France?", "week": "How many days are there in a week?"},
    3: {"sky": "Why is the sky blue?", "bees": "What do bees make?"},
}
"""Questions by request id, by the step before which they arrive. They begin alike, so the later ones find blocks."""


def main() -> None:
    """Run the requests and save the trace."""
    with Engine("smollm2", CONFIG, wait_for_compiled=True) as engine:
        engine.add_request([{"role": "user", "content": document(engine, 2000)}], request_id="long", max_tokens=49)
        for step in range(1000):
            for request_id, question in QUESTIONS.get(step, {}).items():
                drawn = {"temperature": 0.7, "top_p": 0.9, "seed": 4} if request_id == "sky" else {}
                message = [{"role": "user", "content": RULES + question}]
                engine.add_request(message, request_id=request_id, max_tokens=48, **drawn)
            if engine.step() is None and step > max(QUESTIONS):
                break
        PATH.parent.mkdir(exist_ok=True)
        engine.trace.save(PATH)
        print(f"{PATH}: {PATH.stat().st_size / 1024:.0f} KiB, {engine.trace!r}")


if __name__ == "__main__":
    main()
