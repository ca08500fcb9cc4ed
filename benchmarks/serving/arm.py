"""One arm of the serving benchmark, in a separate process: ``arm.py ARM WORKLOAD.json [MODEL.gguf]``.

An engine replays the workload and prints its timelines. A server prints its address, and then its CPU time for every
line that it reads; the client is another process.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from serving.replay import Events, ServingEngine, replay
from serving.workloads import Request, Workload

BLOCK_SIZE = 16

FLOAT32 = "float32"
"""Weights of the arms that are not Workbench as it ships: mlx-lm cannot compute with a GGUF file's packed ones."""
SERVERS = ("workbench_http", "mlx_lm_http")


class WorkbenchEngine:
    """Workbench behind ``add`` and ``step``."""

    def __init__(self, workload: Workload, **choice: str) -> None:
        self._engine = make_engine(workload, **choice)
        self._index: dict[str, int] = {}
        self.forward_passes = self.rows = 0

    def add(self, index: int, prompt: list[int], max_tokens: int) -> None:
        self._index[self._engine.add_request(prompt, max_tokens=max_tokens, ignore_eos=True)] = index

    def step(self) -> Events:
        record = self._engine.step()
        self.forward_passes += 1
        self.rows += record.num_tokens
        return Events(
            [self._index[request_id] for request_id in record.admitted],
            [(self._index[chunk.request_id], chunk.sampled) for chunk in record.chunks if chunk.sampled is not None],
        )

    def close(self) -> None:
        self._engine.close()


def make_engine(workload: Workload, **choice: str):
    """An Engine whose pool holds ``concurrency`` of the longest requests; ``weights`` may be chosen."""
    from workbench import Engine, EngineConfig

    shape = workload.shape
    blocks = -(-workload.longest // BLOCK_SIZE)
    return Engine(
        "smollm2",
        EngineConfig(
            max_num_batched_tokens=shape.token_budget,
            max_num_seqs=shape.concurrency,
            block_size=BLOCK_SIZE,
            num_blocks=1 + shape.concurrency * (blocks + 1),
        ),
        **choice,
    )


def make_arm(arm: str, workload: Workload, path: str) -> ServingEngine:
    """The engine of an arm.

    Raises:
        ValueError: The arm is unknown.
    """
    shape = workload.shape
    if arm == "workbench":
        return WorkbenchEngine(workload)
    if arm == "workbench_float32":
        return WorkbenchEngine(workload, weights=FLOAT32)
    if arm == "llama_cpp":
        from baselines.llama_cpp import LlamaCppEngine

        context = 256 * -(-shape.concurrency * (workload.longest + 1) // 256)
        return LlamaCppEngine(path, shape.concurrency, context, max(shape.token_budget, shape.concurrency))
    from workbench.models import load_model  # installs the BLAS before MLX is imported

    model = load_model("smollm2", weights=FLOAT32).model
    if arm == "phase_separated":
        from baselines.phase_separated import PhaseSeparatedEngine

        return PhaseSeparatedEngine(model, shape.token_budget)
    if arm == "mlx_lm":
        from baselines.mlx_lm_batch import MlxLmEngine

        return MlxLmEngine(model, shape.concurrency)
    known = "workbench, workbench_float32, phase_separated, mlx_lm, llama_cpp or a server"
    raise ValueError(f"arm must be {known}, got {arm!r}")


class ForwardCounter:
    """Count an mlx-lm model's forward passes and their rows of tokens, including padding, at the embedding."""

    def __init__(self) -> None:
        import mlx.nn as nn

        self.forward_passes = self.rows = 0
        embed = nn.Embedding.__call__

        def counted(embedding, token_ids):
            self.forward_passes += 1
            self.rows += token_ids.size
            return embed(embedding, token_ids)

        nn.Embedding.__call__ = counted


def warm_up(workload: Workload) -> Workload:
    """Two short requests of other tokens, to compile the kernels and load the weights."""
    vocabulary = sorted({token for request in workload.requests for token in request.prompt})
    generator = random.Random(1)
    requests = [Request(0.0, [generator.choice(vocabulary) for _ in range(length)], 3) for length in (40, 9)]
    return Workload("warm_up", workload.shape, requests)


def run_server(arm: str, workload: Workload) -> None:
    """Serve until the process is ended."""

    def tell_cpu_time() -> None:
        for _ in sys.stdin:
            print(time.process_time(), flush=True)

    threading.Thread(target=tell_cpu_time, daemon=True).start()
    if arm == "workbench_http":
        from workbench.apps.serve.server import serve
        from workbench.apps.serve.settings import ServeSettings

        serve(make_engine(workload), ServeSettings(port=0))
        return
    from workbench.base import blas

    blas.preload()  # before MLX is imported
    from baselines import mlx_lm_server

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    print(f"serving on http://127.0.0.1:{port}", flush=True)
    mlx_lm_server.serve(port, workload.shape.concurrency)


def main() -> None:
    arm, workload_file, path = sys.argv[1], sys.argv[2], (*sys.argv[3:], "")[0]
    workload = Workload.from_dict(json.loads(Path(workload_file).read_text()))
    if arm in SERVERS:
        run_server(arm, workload)
        return
    engine = make_arm(arm, workload, path)
    replay(warm_up(workload), engine)
    counter: Any = None
    if isinstance(engine, WorkbenchEngine):
        # Its model is compiled, and calls no embedding.
        counter, engine.forward_passes, engine.rows = engine, 0, 0
    elif arm != "llama_cpp":
        counter = ForwardCounter()
    cpu = time.process_time()
    timelines = replay(workload, engine)
    result = {"cpu_s": time.process_time() - cpu}
    if counter is not None:
        result |= {"forward_passes": counter.forward_passes, "rows_computed": counter.rows}
    print(json.dumps({"result": result, "timelines": [asdict(timeline) for timeline in timelines]}))
    if close := getattr(engine, "close", None):
        close()


if __name__ == "__main__":
    main()
