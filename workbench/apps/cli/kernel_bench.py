"""`workbench kernel bench`: what MLX's settings for a GPU and a single write of keys and values change on this machine.

MLX reads ``MLX_MAX_OPS_PER_BUFFER`` once per process, so each setting is measured in separate processes, which take
turns. A decode step of a small model is timed: products, the write of keys and values, and attention in each layer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.apps.cli.options import Commands, add_command, add_number
from workbench.apps.cli.say import say, say_text
from workbench.base.cache_folder import cached, make_folder

VARIABLE = "MLX_MAX_OPS_PER_BUFFER"
SETTINGS: tuple[Mapping[str, str], ...] = ({}, {VARIABLE: "500"}, {VARIABLE: "2000"})
WRITES = ("two writes", "one write")
MIN_GAIN = 0.02
"""A setting is recommended if it saves this share of a step, and more than the same setting varies."""
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, HIDDEN = 9, 3, 64, 16, 576
NUM_SEQS, CONTEXT = 8, 1024

Measured = dict[str, dict[str, list[float]]]
"""Milliseconds of a step of each round, by setting and kind of write."""


def add_parser(actions: Commands) -> None:
    """Add ``bench`` to the actions of ``kernel``."""
    help = "measure settings of MLX for this GPU"
    bench = add_command(actions, "bench", _bench, help, extra="engine")
    add_number(bench, "--layers", 30, "layers of a step")
    add_number(bench, "--rounds", 5, "processes of each setting, which take turns")


def _bench(options: argparse.Namespace) -> int:
    from workbench.base.device import choose_device, runs_on_gpu

    choose_device()
    if not runs_on_gpu():
        say("MLX computes on a CPU here: the settings are for GPUs, and what follows only shows that they run")
    measured = measure(options.layers, options.rounds)
    chosen = recommended(measured)
    path = cached("kernel-bench.json")
    make_folder(path.parent)
    path.write_text(json.dumps({"machine": _machine(), "milliseconds": measured, "recommended": chosen}))
    print(table(measured))
    say_text(f"\n{advice(chosen)}")
    return 0


def measure(layers: int, rounds: int) -> Measured:
    """Milliseconds of a decode step under each setting."""
    found: Measured = {name_of(setting): {write: [] for write in WRITES} for setting in SETTINGS}
    for _ in range(rounds):
        for setting in SETTINGS:
            environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | dict(setting)
            command = [sys.executable, "-m", "workbench.apps.cli.kernel_bench", str(layers)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
            if done.returncode:
                raise RuntimeError(f"a process of kernel bench has failed: {done.stderr.strip().splitlines()[-1:]}")
            for write, milliseconds in json.loads(done.stdout.splitlines()[-1]).items():
                found[name_of(setting)][write].append(milliseconds)
    return found


def name_of(setting: Mapping[str, str]) -> str:
    """A setting as one would type it."""
    return " ".join(f"{name}={value}" for name, value in setting.items()) or "as MLX has it"


def table(measured: Measured) -> str:
    """The medians, and their ratio to MLX's own setting with two writes."""
    base = statistics.median(measured[name_of({})][WRITES[0]])
    lines = [f"{'milliseconds of a decode step':32}" + "".join(f"{write:>22}" for write in WRITES)]
    for name, by_write in measured.items():
        cells = [statistics.median(by_write[write]) for write in WRITES]
        lines.append(f"{name:32}" + "".join(f"{f'{cell:.3f} ({cell / base:.3f})':>22}" for cell in cells))
    return "\n".join(lines)


def recommended(measured: Measured) -> dict[str, str]:
    """The setting that is faster by more than `MIN_GAIN` and than rounds differ; empty to leave MLX's own."""
    base = measured[name_of({})][WRITES[0]]
    best = min(SETTINGS, key=lambda setting: statistics.median(measured[name_of(setting)][WRITES[0]]))
    times = measured[name_of(best)][WRITES[0]]
    is_faster = statistics.median(times) < (1 - MIN_GAIN) * statistics.median(base) and max(times) < min(base)
    return dict(best) if is_faster else {}


def advice(chosen: Mapping[str, str]) -> str:
    """The advice, as a line."""
    if not chosen:
        return "no setting is faster by more than rounds differ: leave MLX's own"
    return f"set {name_of(chosen)} before Python starts: decode steps are faster with it on this machine"


def remembered_advice() -> str:
    """The advice of the last `workbench kernel bench` on this machine with this MLX; empty without one."""
    try:
        kept = json.loads(cached("kernel-bench.json").read_text())
        return advice(kept["recommended"]) if kept["machine"] == _machine() else ""
    except (OSError, ValueError, KeyError):
        return ""


def _machine() -> list[str]:
    import mlx.core as mx

    version = mx.__version__  # type: ignore[attr-defined]
    return [str(mx.default_device()), str(mx.device_info().get("device_name", "CPU")), version]


def step_milliseconds(layers: int, one_write: bool, repeats: int = 20) -> float:
    """Median time of a decode step in this process."""
    import mlx.core as mx
    import numpy as np

    from workbench.base.device import runs_on_gpu
    from workbench.kernels.attention.metadata import AttentionMetadata
    from workbench.kernels.attention.options import AttentionOptions
    from workbench.kernels.attention.selection import get_backend

    dtype = mx.float16 if runs_on_gpu() else mx.float32
    backend, options = get_backend(), AttentionOptions(HEAD_DIM**-0.5)
    blocks = np.arange(NUM_SEQS * CONTEXT // BLOCK_SIZE, dtype=np.int32).reshape(NUM_SEQS, -1)
    metadata = AttentionMetadata(
        cu_seqlens_q=np.arange(NUM_SEQS + 1, dtype=np.int32),
        seqused_k=np.full(NUM_SEQS, CONTEXT, np.int32),
        block_table=blocks,
        slot_mapping=blocks[:, -1].astype(np.int64) * BLOCK_SIZE + BLOCK_SIZE - 1,
        block_size=BLOCK_SIZE,
    )
    widths = [(HIDDEN, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM), (NUM_HEADS * HEAD_DIM, HIDDEN)]
    weights = [mx.random.normal(shape).astype(dtype) * 0.02 for shape in (*widths, (HIDDEN, 1536), (1536, HIDDEN))]
    slots = (blocks.size, BLOCK_SIZE, NUM_KV_HEADS)
    k_cache, v_cache = (mx.zeros((*slots, HEAD_DIM), dtype) for _ in range(2))
    written = [mx.zeros((*slots, 2 * HEAD_DIM), dtype)] if one_write else [mx.zeros((*slots, HEAD_DIM), dtype)] * 2
    written = [mx.array(array) for array in written]
    mx.eval(weights, k_cache, v_cache, written)

    def step() -> mx.array:
        x = mx.ones((NUM_SEQS, HIDDEN), dtype)
        for _ in range(layers):
            rows = (x @ weights[0]).reshape(NUM_SEQS, -1, HEAD_DIM)
            q, k, v = mx.split(rows, [NUM_HEADS, NUM_HEADS + NUM_KV_HEADS], axis=1)
            new = [mx.concatenate([k, v], axis=-1)] if one_write else [k, v]
            for array, part in zip(written, new):
                array[metadata.write_index] = part
            out = backend.attend(q, k_cache, v_cache, metadata, options)
            x = x + out.reshape(NUM_SEQS, -1) @ weights[1]
            x = x + mx.maximum(x @ weights[2], 0) @ weights[3]
        return x

    seconds = []
    for _ in range(repeats + 3):
        started = time.perf_counter()
        mx.eval(step(), written)
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds[3:])


def main(arguments: Sequence[str]) -> None:
    """Measure in this process, and print the milliseconds."""
    import workbench  # noqa: F401  (before MLX: it installs the BLAS)
    from workbench.base.device import choose_device

    choose_device()
    layers = int(arguments[0])
    found: dict[str, Any] = {write: step_milliseconds(layers, write == WRITES[1]) for write in WRITES}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
