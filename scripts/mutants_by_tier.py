# ruff: noqa: E501 (a table of one line per fault)
"""Plant faults of one line in a copy of the checkout, and print the test that finds each.

    python scripts/mutants_by_tier.py [--room scheduler] [--tier check]

A fault is run with the test file that finds it, in the first tier that has the file, until a test fails. It takes five
minutes of processor time for all faults. The exit status is 1 if a fault is not found.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from tiers import CHECK, CHECK_LEAVES_OUT  # noqa: E402

PARTS = ("workbench", "tests", "scripts", "benchmarks", "notebooks", "docs", "conftest.py", "pyproject.toml")
LINT = "ruff"
"""In place of a test: `make lint` finds the fault, and so does `make check`, of which it is a part."""


class Fault(NamedTuple):
    """In a file below workbench/, the only ``old`` becomes ``new``; ``test`` below tests/ finds it."""

    file: str
    old: str
    new: str
    test: str

    @property
    def room(self) -> str:
        """The room of the file."""
        return self.file.split("/")[0]

    @property
    def path(self) -> str:
        """The test's file; "" for lint."""
        return "" if self.test == LINT else f"tests/{self.test}.py"

    @property
    def tier(self) -> str:
        """The first tier that finds the fault."""
        is_quick = self.path.startswith(CHECK) and not self.path.startswith(CHECK_LEAVES_OUT)
        return "check" if is_quick or self.test == LINT else "test"


FAULTS = (
    Fault("scheduler/block_pool.py", "if count > len(free):", "if count > len(free) + 1:", "scheduler/test_block_pool"),
    Fault("scheduler/kv_cache_manager.py", "request.block_hashes[: (num_tokens - 1) // size]", "request.block_hashes[: num_tokens // size]", "scheduler/test_scheduler"),
    Fault("scheduler/kv_cache_manager.py", "num_lacking > self.num_free_blocks and hit is None", "num_lacking >= self.num_free_blocks and hit is None", "scheduler/test_scheduler"),
    Fault("scheduler/kv_cache_groups.py", "lacking = -(-num_slots // self.block_size) -", "lacking = -(-(num_slots - 1) // self.block_size) -", "scheduler/test_kv_cache_managers"),
    Fault("scheduler/kv_cache_manager.py", "num_lacking = -(-num_tokens // self.block_size) - len(table)", "num_lacking = -(-(num_tokens - 1) // self.block_size) - len(table)", "scheduler/test_scheduler"),
    Fault("scheduler/admission.py", "- 1 + in_flight) // group.block_size) + 1", "- 1 + in_flight) // group.block_size)", "scheduler/test_admission"),
    Fault("scheduler/queues.py", "plan.limit(batch.long_prefill_cap,", "plan.limit(batch.long_prefill_cap + 1,", "laws/test_laws"),
    Fault("scheduler/scheduler.py", "len(queues.running) >= self.max_running:\n", "len(queues.running) > self.max_running:\n", "scheduler/test_scheduler"),
    Fault("scheduler/scheduler.py", "max(victim.num_kv_lost, num_computed)", "num_computed", "scheduler/test_scheduler"),
    Fault("scheduler/batch.py", "(1 + len(self.drafts) if self.samples", "(len(self.drafts) if self.samples", "scheduler/test_kv_bugs"),
    Fault("scheduler/scheduler.py", "        request.num_kv_computed = end\n", "        request.num_kv_computed = end if samples else chunk.start\n", "scheduler/test_scheduler_bugs"),
    Fault("scheduler/scheduler.py", "        return cap\n", "        return 0\n", "scheduler/test_scheduler"),
    Fault("scheduler/partial_prefills.py", "config.long_prefill_token_threshold or config.token_budget", "config.token_budget", "scheduler/test_partial_prefills"),
    Fault("scheduler/scheduler.py", "len(queues.running) >= self.max_running:\n                break", '(len(queues.running) >= self.max_running and request.status != "preempted"):\n                break', "scheduler/test_scheduler"),
    Fault("scheduler/scheduler.py", "return batch.has_prefill, batch.num_tokens", "return batch.has_prefill, batch.num_tokens + sum(chunk.num_cached_tokens for chunk in batch.chunks)", "scheduler/test_scheduler"),
    Fault("scheduler/partial_prefills.py", "if num_uncached > self._slack:", "if False:", "scheduler/test_partial_prefills"),
    Fault("scheduler/partial_prefills.py", "while cut and budget > 0 and progress:", "while False:", "scheduler/test_partial_prefills"),
    Fault("scheduler/partial_prefills.py", "plan.limit(self.share,", "plan.limit(plan.num_tokens,", "scheduler/test_partial_prefills"),
    Fault("scheduler/partial_prefills.py", "self._num(self._long) >= self._max_long:", "self._num(self._long) > self._max_long:", "scheduler/test_partial_prefills"),
    Fault("scheduler/scheduler.py", 'chunk.arm, batch.prefill_continued = "cached_final", True', 'chunk.arm, batch.prefill_continued = "new_final", True', "scheduler/test_scheduler_bugs"),
    Fault("scheduler/batch.py", "c.request.request_id, c.start, c", "c.request.request_id, c.start + c.num_tokens * (not c.samples), c", "scheduler/test_scheduler_bugs"),
    Fault("engine/packed_batch.py", "short = packed.seqused_k > lengths", "short = packed.seqused_k >= lengths", "engine/test_recurrent_state"),
    Fault("engine/packed_batch.py", "tokens += [max(0, token) for token in drafts]", "tokens += [0 for token in drafts]", "engine/test_speculative_engine"),
    Fault("engine/engine.py", "default=1) - 1\n", "default=1) - 2\n", "engine/test_engine"),
    Fault("engine/sampler.py", "return probabilities / probabilities.sum()", "return probabilities", "engine/test_sampler"),
    Fault("engine/memory.py", "min(fitting, 1 + config.max_num_seqs", "min(fitting, config.max_num_seqs", "engine/test_memory"),
    Fault("engine/packed_batch.py", "positions=positions.astype(np.int32)", "positions=np.arange(total, dtype=np.int32)", "engine/test_packed_batch"),
    Fault("engine/packed_batch.py", "return (bounds[1:] - 1)[counts > 0]", "return bounds[1:] - 1", "engine/test_packed_batch"),
    Fault("engine/packed_batch.py", "(cu[0] == 0 and cu[-1]", "(cu[0] >= 0 and cu[-1]", "engine/test_packed_batch"),
    Fault("engine/packed_batch.py", "np.int64(block_size) + offset", "np.int64(block_size)", "engine/test_packed_batch"),
    Fault("engine/packed_batch.py", "np.int64(block_size) + offset", "np.int64(block_size) + offset - offset[np.searchsorted(row_seq, row_seq)]", "engine/test_packed_batch"),
    Fault("engine/distributed/lockstep.py", "by_group=tuple(map(tables, groups)) if len(groups) > 1 else (),", "by_group=(),", "distributed/test_distributed"),
    Fault("engine/distributed/lockstep.py", "return max(self.num_tokens)", "return min(self.num_tokens)", "distributed/test_distributed"),
    Fault("engine/packed_batch.py", "        or (lengths < previous.table_lengths).any()\n", "", "engine/test_packed_batch"),
    Fault("engine/forward/layer_by_layer.py", "            best = most_likely_rows(values)\n", "            mx.eval(values)\n            best = most_likely_rows(values)\n", "engine/test_one_wait"),
    Fault("kernels/attention/work_list.py", "first_visible(first_position, window)", "first_visible(first_position + 1, window)", "attention/test_work_list"),
    Fault("kernels/attention/work_list.py", "kv_end = first_position + num_rows", "kv_end = first_position + num_rows - 1", "attention/test_work_list"),
    Fault("kernels/attention/gather.py", "(keys >= first_visible(rows, reach))", "(keys > first_visible(rows, reach))", "attention/test_attention"),
    Fault("kernels/attention/gather.py", "first // size : -(-end // size)]", "first // size : end // size]", "attention/test_attention"),
    Fault("kernels/attention/validate.py", "_first(held_blocks > block_table.shape[1])", "_first(held_blocks > block_table.shape[1] + 1)", "attention/test_attention_validate"),
    Fault("kernels/attention/validate.py", "_first(seqused_k < query_lens)", "_first(seqused_k < query_lens - 1)", "attention/test_attention_validate"),
    Fault("kernels/attention/metal/find_seq_idx.metal", "[middle] <= row", "[middle] < row", "attention/metal/test_metal_kernel_triangle"),
    Fault("kernels/attention/dense.py", "(row_part[:, None] == column_part) & (column", "(column", "attention/test_attention"),
    Fault("kernels/attention/dense.py", "block_diagonal_mask(parts, options.reach))\n", "block_diagonal_mask(parts, options.reach)).astype(mx.float32)\n", "attention/test_attention"),
    Fault("kernels/attention/dense.py", "parts: list[Part], reach: int = -1)", "parts: list[Part] = [], reach: int = -1)", "ruff"),
    Fault("kernels/attention/validate.py", "_first(query_lens < 0)", "_first(query_lens < -(2**31))", "attention/test_attention_validate"),
    Fault("kernels/attention/validate.py", "cu_seqlens_q[0] != 0", "cu_seqlens_q[0] < 0", "attention/test_attention_validate"),
    Fault("kernels/attention/validate.py", "cu_seqlens_q[-1] != num_tokens", "cu_seqlens_q[-1] > num_tokens", "attention/test_attention_validate"),
    Fault("kernels/attention/metadata.py", "field(default_factory=dict, repr", "field(default_factory=lambda shared={}: shared, repr", "attention/test_work_list"),
    Fault("kernels/attention/metal/tile.metal", "scoring.softcap * tanh(scores[group].thread_elements()[0])", "scoring.softcap * scores[group].thread_elements()[0]", "attention/metal/test_metal_kernel_triangle"),
    Fault("kernels/attention/metal/paged_varlen.metal", "0 : position - window[0])", "0 : position - window[0] + 1)", "attention/metal/test_metal_kernel_triangle"),
    Fault("kernels/attention/metal/paged_varlen.metal", "(!is_decode || simdgroup_id == 0) && sinks", "sinks", "attention/metal/test_metal_kernel_triangle"),
    Fault("kernels/attention/metal/merge_splits.metal", "float maximum = -INFINITY;", "float maximum = 0.0f;", "attention/metal/test_metal_kernel_mutants"),
    Fault("kernels/attention/metal/tile_shape.py", "THREADGROUP_MEMORY = 32768", "THREADGROUP_MEMORY = 65536", "attention/metal/test_tile_shape"),
    Fault("kernels/attention/metadata.py", "return np.pad(table, ((0, missing), (0, 0))) if missing > 0 else table", "return table", "attention/test_work_list"),
    Fault("kernels/attention/dense.py", "MAX_ROWS = 4096", "MAX_ROWS = 8192", "attention/test_attention"),
    Fault("trace/records.py", "* size + positions % size)", "* size + positions // size)", "trace/test_records"),
    Fault("trace/records.py", "(keys <= rows) & (keys > rows - window)", "(keys < rows) & (keys > rows - window)", "trace/test_records"),
    Fault("trace/pool_change.py", "step = 1 if -entry > blocks[-1] else -1", "step = 1", "laws/test_laws"),
    Fault("trace/line_codec.py", "while last > num_required and", "while last > num_required + 1 and", "trace/test_trace_file"),
    Fault("trace/checks.py", "if record.end < record.time:", "if record.end < 0:", "trace/test_records"),
    Fault("trace/records.py", "(keys <= rows) & (keys > rows - window)", "keys > rows - window", "trace/test_records"),
    Fault("trace/records.py", "column : column + chunk.num_kv] = seen", ": chunk.num_kv] = seen", "trace/test_records"),
    Fault("viz/layout/timeline.py", "(sum(total) - decode) / len(total)", "sum(total) / len(total)", "viz/test_viz_layout"),
    Fault("viz/layout/timeline.py", "size = max(1, -(-len(records) // max_bars))", "size = max(1, len(records) // max_bars)", "viz/test_viz_layout"),
    Fault("viz/layout/packed_batch.py", "floor = min(least, width / len(sizes))", "floor = least", "viz/test_viz_layout"),
    Fault("viz/layout/pool.py", "while columns * columns < num_blocks", "while columns * columns <= num_blocks", "viz/test_viz_layout"),
    Fault("viz/layout/packet.py", "offset += -(-count * dtype.itemsize // 8) * 8", "offset += count * dtype.itemsize", "viz/test_viz_packet"),
    Fault("viz/layout/mask.py", "ends = [self.first_position + place + 1 for", "ends = [len(self.columns) for", "viz/test_viz_static"),
    Fault("viz/layout/mask.py", "left, top, bottom = self.columns.start,", "left, top, bottom = 0,", "viz/test_viz_static"),
    Fault("viz/svg.py", "str(block), ink", "str(logical), ink", "viz/test_viz_static"),
    Fault("viz/js/rectangle.js", "k = from; k < to; k++", "k = from; k < chunk.end; k++", "viz/test_marks_of_batches"),
    Fault("viz/js/rectangle.js", "LEFT + (column + k) * dx, TOP", "LEFT + k * dx, TOP", "viz/test_marks_of_batches"),
    Fault("viz/js/block_tables.js", "String(block), x + width", "String(logical), x + width", "viz/test_marks_of_batches"),
    Fault("analysis/causes.py", "len(self.culprits) - MAX_CULPRITS", "len(self.culprits)", "viz/test_viz_explanation"),
)  # fmt: skip


def copy_checkout(root: Path) -> None:
    """Copy what the tests need into an empty folder."""
    for part in PARTS:
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, root / part)


@contextmanager
def planted(fault: Fault, root: Path) -> Iterator[Path]:
    """The file of a copy, with the fault for as long as the context is open.

    Raises:
        ValueError: The file does not have the text once.
    """
    path = root / "workbench" / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.file} has {text.count(fault.old)} times {fault.old!r}; it must have it once")
    path.write_text(text.replace(fault.old, fault.new))
    try:
        yield path
    finally:
        path.write_text(text)


def finder(fault: Fault, root: Path) -> str:
    """The first test that fails with a fault, in a copy of the checkout; empty if none does."""
    with planted(fault, root) as path:
        if fault.test == LINT:
            done = subprocess.run([sys.executable, "-m", "ruff", "check", "--quiet", path], capture_output=True)
            return LINT if done.returncode == 1 else ""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", "--tier", fault.tier]
        done = subprocess.run([*command, fault.path], cwd=root, capture_output=True)
    if done.returncode != 1:
        return ""
    lines = done.stdout.decode().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(("FAILED tests/", "ERROR tests/")))


def main() -> int:
    """Plant, run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", help="faults of one room only")
    parser.add_argument("--tier", choices=("check", "test"), help="faults that this tier finds first only")
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if options.room in (None, fault.room) and options.tier in (None, fault.tier)]
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        copy_checkout(Path(folder))
        for fault in chosen:
            found = finder(fault, Path(folder))
            lost += not found
            print(f"{fault.tier:6} {fault.file}: {fault.new.strip()!r}  {found or 'NOT FOUND'}", flush=True)
    print(f"{len(chosen) - lost} of {len(chosen)} found")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
