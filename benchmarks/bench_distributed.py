"""The cost of several ranks on this machine's loopback: sums over the ranks, sending a step, and steps of SmolLM2.

- one ``all_sum`` of hidden states, by number of tokens (MLX's ring);
- one packed batch sent to every rank with an answer from each, over the link and by ``all_sum``;
- waiting, in a sum and on the link;
- steps of SmolLM2 on one rank and on three: wall time, processor time of all ranks, sums and bytes per step.

Ranks that share processors wait for each other's time slices (MLX's ring spins). The numbers of three ranks on a
machine with two cores therefore show the composition of a step, not the speed of three machines.

    python benchmarks/bench_distributed.py
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))
from _common import save, summarise

if TYPE_CHECKING:
    import mlx.core as mx

    from workbench.engine.distributed.link import Link

HIDDEN_SIZE, NUM_LAYERS = 576, 30  # SmolLM2's
ROWS = (1, 16, 256)
NUM_DECODES, CONTEXT, BLOCK_SIZE = 16, 512, 16
FIRST_PORT = 28_000


def milliseconds(work: Any, repeats: int, warm: int = 5) -> dict[str, float]:
    """Wall time of each repeat."""
    times = []
    for _ in range(warm + repeats):
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return summarise(times[warm:])


def measure_messages(repeats: int) -> dict[str, Any]:
    """Measure sums and messages on every rank; return rank 0's times."""
    import mlx.core as mx
    import numpy as np

    from workbench.engine.distributed.group import join_group, leader_host
    from workbench.engine.distributed.link import Kind, open_link
    from workbench.engine.distributed.wire import decode, encode
    from workbench.engine.packed_batch import pack

    group = join_group()
    link = open_link(group, leader_host())

    def add_up(array: mx.array) -> None:
        mx.eval(mx.distributed.all_sum(array, group=group))

    results: dict[str, Any] = {"all_sum of [tokens, 576] float32, ms": {}}
    for rows in ROWS:
        array = mx.random.normal((rows, HIDDEN_SIZE))
        mx.eval(array)
        results["all_sum of [tokens, 576] float32, ms"][str(rows)] = milliseconds(lambda a=array: add_up(a), repeats)

    num_blocks = CONTEXT // BLOCK_SIZE + 1
    decodes = [
        (list(range(1 + index * num_blocks, 1 + (index + 1) * num_blocks)), CONTEXT, 1, [index], True, "r")
        for index in range(NUM_DECODES)
    ]
    data = encode(pack(decodes, BLOCK_SIZE))
    numbers = mx.array(np.frombuffer(data, dtype=np.int32))

    def tell_and_hear() -> None:
        if group.rank():
            decode(link.receive().payload)
            link.send(0, Kind.READY)
        else:
            link.broadcast(Kind.STEP, data)
            for _ in range(group.size() - 1):
                link.receive()

    results[f"a batch of {NUM_DECODES} decodes at {CONTEXT}, bytes"] = len(data)
    results["told over the link and answered, ms"] = milliseconds(tell_and_hear, repeats)
    results["told by all_sum, not answered, ms"] = milliseconds(lambda: add_up(numbers), repeats)
    results["processor time of a rank that waits for 1 s, ms"] = measure_waiting(link, add_up)
    link.close()
    return results if group.rank() == 0 else {}


def measure_waiting(link: Link, add_up: Callable[[mx.array], None]) -> dict[str, float]:
    """Processor time of rank 1 while it waits for an idle rank 0, in a sum and on the link."""
    import mlx.core as mx

    from workbench.engine.distributed.link import Kind

    one, costs = mx.array([1.0]), {}
    for where in ("in all_sum", "on the link"):
        add_up(one)
        start = time.process_time()
        if link.rank == 0:
            time.sleep(1.0)
        if where == "in all_sum":
            add_up(one)
        elif link.rank == 0:
            link.broadcast(Kind.STEP)
        else:
            link.receive()
        cost = 1e3 * (time.process_time() - start)
        if link.rank:
            link.send(0, Kind.READY, str(cost).encode())
        else:
            answers = [link.receive() for _ in range(link.size - 1)]
            costs[where] = next(float(answer.payload) for answer in answers if answer.rank == 1)
    return costs


def measure_steps(repeats: int) -> dict[str, Any]:
    """Measure steps of SmolLM2 on all ranks; return rank 0's times."""
    import mlx.core as mx

    from workbench import EngineConfig, SamplingParams
    from workbench.engine.distributed.job import MakeEngine, run_job
    from workbench.models import LoadedModel

    results: dict[str, Any] = {}
    sums: list[int] = []
    all_sum = mx.distributed.all_sum

    def counted(array: mx.array, **options: Any) -> mx.array:
        sums.append(array.nbytes)
        return all_sum(array, **options)

    def lead(_model: LoadedModel, make_engine: MakeEngine) -> int:
        with make_engine(EngineConfig(max_num_batched_tokens=256, num_blocks=256)) as engine:
            results["processor seconds before the first step, rank 0"] = time.process_time()
            mx.distributed.all_sum = counted
            for index in range(4):
                prompt = [(7919 * (index + i)) % 40_000 for i in range(64)]
                engine.add_request(prompt, SamplingParams(max_tokens=repeats + 1, ignore_eos=True))
            steps = []
            start = time.process_time()
            while (record := engine.step()) is not None:
                steps.append((record, len(sums), sum(sums), time.process_time() - start))
                sums.clear()
                start = time.process_time()
            for name, chosen in (("256 prompt tokens", steps[:1]), ("4 decodes", steps[1:])):
                results[name] = {
                    "step, ms": summarise([1e3 * record.duration for record, *_ in chosen]),
                    "forward pass, ms": summarise([1e3 * record.timings["forward"] for record, *_ in chosen]),
                    "processor time of rank 0, ms": summarise([1e3 * step[3] for step in chosen]),
                    "sums over the ranks": chosen[0][1],
                    "bytes summed": chosen[0][2],
                }
            results["tokens"] = [list(output.token_ids) for output in engine.outputs.values()]
        return 0

    run_job("smollm2", lead)
    return results


MEASURES = {"messages": measure_messages, "steps": measure_steps}


def launch(what: str, size: int, repeats: int) -> dict[str, Any]:
    """Run a measurement on ``size`` ranks and return the result of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        out, hosts = Path(folder) / "out.json", Path(folder) / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports(size)]) if size > 1 else "")
        command = [sys.executable, __file__, "--repeats", str(repeats), "--rank-of", what, "--out", str(out)]
        variables = {**os.environ, "MLX_HOSTFILE": str(hosts)}
        ranks = [subprocess.Popen(command, env={**variables, "MLX_RANK": str(rank)}) for rank in range(size)]
        try:
            statuses = [rank.wait(600) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(statuses):
            raise RuntimeError(f"{what} on {size} ranks ended with {statuses}")
        return json.loads(out.read_text())


def _free_ports(count: int) -> list[int]:
    """Free ports below the range of outgoing connections."""
    free: list[int] = []
    for port in range(FIRST_PORT, 32_000):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        free.append(port)
        if len(free) == count:
            return free
    raise RuntimeError("no free ports")


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rank-of", choices=MEASURES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        import workbench  # noqa: F401  (before MLX: it installs the BLAS)

        if found := MEASURES[options.rank_of](options.repeats):
            options.out.write_text(json.dumps(found))
        return
    results: dict[str, Any] = {}
    for size in (2, 3):
        results[f"messages, {size} ranks"] = launch("messages", size, options.repeats)
    for size in (1, 3):
        results[f"SmolLM2, {size} rank{'s' if size > 1 else ''}"] = launch("steps", size, options.repeats)
    alone, together = (results[name].pop("tokens") for name in ("SmolLM2, 1 rank", "SmolLM2, 3 ranks"))
    if alone != together:
        raise RuntimeError(f"three ranks wrote {together}, one wrote {alone}")
    results["tokens of 3 ranks equal those of 1"] = sum(map(len, alone))
    decodes = results["SmolLM2, 3 ranks"]["4 decodes"]
    expected = 2 * NUM_LAYERS, 2 * NUM_LAYERS * 4 * HIDDEN_SIZE * 4  # 4 decodes, 4 bytes per element
    assert (decodes["sums over the ranks"], decodes["bytes summed"]) == expected, decodes
    print(json.dumps(results, indent=2))
    save("distributed", results)


if __name__ == "__main__":
    main()
