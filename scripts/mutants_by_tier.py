# ruff: noqa: E501 (a table of one line per fault)
"""Plant faults of one line in a copy of the checkout, and print the tier of the tests that finds each.

    python scripts/mutants_by_tier.py [--room scheduler] [--tier test]

A fault is run with the tests of its room that belong to the tier, and with `tests/laws/test_laws.py`, until one fails.
It takes 25 minutes of processor time for all faults. Faults that the tier ``check`` finds are not run again:
the tier ``test`` contains its tests.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from tiers import CHECK  # noqa: E402

PARTS = ("workbench", "tests", "scripts", "benchmarks", "notebooks", "docs", "conftest.py", "pyproject.toml")


class Fault(NamedTuple):
    """In a file below workbench/, the only ``old`` becomes ``new``."""

    file: str
    old: str
    new: str


FAULTS = (
    Fault("scheduler/block_pool.py", "if count > len(free):", "if count > len(free) + 1:"),
    Fault("scheduler/kv_cache_manager.py", "request.block_hashes[: (num_tokens - 1) // size]", "request.block_hashes[: num_tokens // size]"),
    Fault("scheduler/kv_cache_manager.py", "num_lacking > self.num_free_blocks and hit is None", "num_lacking >= self.num_free_blocks and hit is None"),
    Fault("scheduler/kv_cache_groups.py", "lacking = -(-num_slots // self.block_size) -", "lacking = -(-(num_slots - 1) // self.block_size) -"),
    Fault("scheduler/admission.py", "- 1 + in_flight) // group.block_size) + 1", "- 1 + in_flight) // group.block_size)"),
    Fault("scheduler/queues.py", "plan.limit(batch.long_prefill_cap,", "plan.limit(batch.long_prefill_cap + 1,"),
    Fault("scheduler/scheduler.py", "len(queues.running) >= self.max_running:\n", "len(queues.running) > self.max_running:\n"),
    Fault("scheduler/scheduler.py", "max(victim.num_kv_lost, num_computed)", "num_computed"),
    Fault("engine/packed_batch.py", "short = packed.seqused_k > lengths", "short = packed.seqused_k >= lengths"),
    Fault("engine/packed_batch.py", "tokens += [max(0, token) for token in drafts]", "tokens += [0 for token in drafts]"),
    Fault("scheduler/batch.py", "(1 + len(self.drafts) if self.samples", "(len(self.drafts) if self.samples"),
    Fault("engine/engine.py", "default=1) - 1\n", "default=1) - 2\n"),
    Fault("engine/sampler.py", "return probabilities / probabilities.sum()", "return probabilities"),
    Fault("engine/memory.py", "min(fitting, 1 + config.max_num_seqs", "min(fitting, config.max_num_seqs"),
    Fault("kernels/attention/work_list.py", "first_position - window, 0)", "first_position - window + 1, 0)"),
    Fault("kernels/attention/work_list.py", "kv_end = first_position + num_rows", "kv_end = first_position + num_rows - 1"),
    Fault("kernels/attention/gather.py", "(keys >= rows - left)", "(keys > rows - left)"),
    Fault("kernels/attention/gather.py", "first // size : -(-end // size)]", "first // size : end // size]"),
    Fault("kernels/attention/validate.py", "_first(held_blocks > block_table.shape[1])", "_first(held_blocks > block_table.shape[1] + 1)"),
    Fault("kernels/attention/validate.py", "_first(seqused_k < query_lens)", "_first(seqused_k < query_lens - 1)"),
    Fault("trace/records.py", "* size + positions % size)", "* size + positions // size)"),
    Fault("trace/records.py", "column + chunk.num_kv] = keys <= rows", "column + chunk.num_kv] = keys < rows"),
    Fault("trace/pool_change.py", "step = 1 if -entry > blocks[-1] else -1", "step = 1"),
    Fault("trace/line_codec.py", "while last > num_required and", "while last > num_required + 1 and"),
    Fault("trace/checks.py", "if record.end < record.time:", "if record.end < 0:"),
    Fault("viz/layout/timeline.py", "(sum(total) - decode) / len(total)", "sum(total) / len(total)"),
    Fault("viz/layout/timeline.py", "size = max(1, -(-len(records) // max_bars))", "size = max(1, len(records) // max_bars)"),
    Fault("viz/layout/packed_batch.py", "floor = min(least, width / len(sizes))", "floor = least"),
    Fault("viz/layout/pool.py", "while columns * columns < num_blocks", "while columns * columns <= num_blocks"),
    Fault("viz/layout/packet.py", "offset += -(-count * dtype.itemsize // 8) * 8", "offset += count * dtype.itemsize"),
    Fault("viz/layout/explanation.py", "len(part.culprits) - MAX_CULPRITS", "len(part.culprits)"),
)  # fmt: skip


def tests_of(room: str, tier: str, root: Path) -> list[str]:
    """Paths of the tests of a room in a tier, single files first: folders hold the slower tests."""
    folder = root / "tests" / room
    if tier == "check":
        found = [path for path in CHECK if (root / path) == folder or folder in (root / path).parents]
    else:
        found = [str(path.relative_to(root)) for path in sorted(folder.glob("test_*.py"))]
        found += [str(path.relative_to(root)) for path in sorted(folder.iterdir()) if any(path.glob("test_*.py"))]
    return [*found, "tests/laws/test_laws.py"]


def finder(fault: Fault, tier: str, root: Path) -> str:
    """The first test of a tier that fails with a fault; empty if none does."""
    path = root / "workbench" / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.file} has {text.count(fault.old)} times {fault.old!r}; it must have it once")
    path.write_text(text.replace(fault.old, fault.new))
    try:
        tests = tests_of(fault.file.split("/")[0], tier, root)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", "--tier", tier, *tests]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    finally:
        path.write_text(text)
    if done.returncode > 1:
        return "(collection)"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
    return failed[0].split()[1].rpartition("/")[2] if failed else ""


def main() -> None:
    """Plant, run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", help="faults of one room only")
    parser.add_argument("--tier", choices=("check", "test"), default="test", help="the last tier that is run")
    options = parser.parse_args()
    counts: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for part in PARTS:
            (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, root / part)
        for fault in FAULTS:
            room = fault.file.removeprefix("kernels/").split("/")[0]
            if options.room not in (None, room):
                continue
            tiers = ("check", "test")[: 1 + (options.tier == "test")]
            found = next(((tier, test) for tier in tiers if (test := finder(fault, tier, root))), ("none", ""))
            count = counts.setdefault(room, [0, 0, 0])
            count[0] += found[0] == "check"
            count[1] += found[0] != "none"
            count[2] += 1
            print(f"{found[0]:6} {fault.file}: {fault.new.strip()!r}  {found[1]}", flush=True)
    for room, (quick, all_found, total) in counts.items():
        print(f"{room}: check finds {quick} of {total}, {options.tier} {all_found}")


if __name__ == "__main__":
    main()
