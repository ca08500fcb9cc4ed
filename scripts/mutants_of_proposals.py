# ruff: noqa: E501 (a table of one line per fault)
"""Plant a fault in the place of each row of docs/proposals.md, and run the test that the row names.

    python scripts/mutants_of_proposals.py [--row 'RoPE restarts']

A row is known by the beginning of its first cell. The exit status is 1 if a test passes with its fault. It takes three
minutes of processor time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from mutants_by_tier import LINT, Fault, copy_checkout, planted

PACKED = "tests/engine/test_packed_batch.py::"
BUGS = "tests/scheduler/test_scheduler_bugs.py::"
SHARES = "tests/scheduler/test_partial_prefills.py::"
METAL = "tests/attention/metal/"


class Row(NamedTuple):
    """A row of the page: with ``old`` replaced by ``new`` in a file of workbench/, ``test`` must fail."""

    item: str
    file: str
    old: str
    new: str
    test: str

    @property
    def name(self) -> str:
        """The word by which the page names the test."""
        return self.test.rpartition("::")[2] if "::" in self.test else self.test


ROWS = (
    Row("`prepare_unified`", "engine/packed_batch.py", "row_seq = np.repeat(np.arange(num_seqs), length)", "row_seq = np.repeat(np.arange(num_seqs), length)[::-1]", "tests/engine/test_packed_batch.py"),
    Row("slots, cu_seqlens", "engine/packed_batch.py", "np.int64(block_size) + offset", "np.int64(block_size)", PACKED + "test_exact_layout"),
    Row("one forward pass for chunks", "engine/packed_batch.py", "seqused_k=(start + length).astype", "seqused_k=np.where(length > 1, length, start + length).astype", "tests/engine/test_engine_exactness.py"),
    Row("logits of the rows that are sampled", "engine/packed_batch.py", "return (bounds[1:] - 1)[counts > 0]", "return bounds[1:] - 1", PACKED + "test_only_the_last_row_of_a_sampling_chunk_has_logits"),
    Row("one wait for the device", "engine/forward/layer_by_layer.py", "            best = most_likely_rows(values)\n", "            mx.eval(values)\n            best = most_likely_rows(values)\n", "tests/engine/test_one_wait.py"),
    Row("four roles of a chunk", "scheduler/scheduler.py", 'chunk.arm = "intermediate"', 'chunk.arm = "cached_final"', "tests/scheduler/test_scheduler_bugs.py"),
    Row("several prompts in one row", "kernels/attention/dense.py", "(row_part[:, None] == column_part) & (column", "(column", "tests/attention/test_attention.py"),
    Row("RoPE restarts", "engine/packed_batch.py", "positions=positions.astype(np.int32)", "positions=np.arange(total, dtype=np.int32)", PACKED + "test_exact_layout"),
    Row("batches of more than 4,096", "kernels/attention/dense.py", "MAX_ROWS = 4096", "MAX_ROWS = 8192", "tests/attention/test_attention.py::test_dense_takes_more_rows_than_its_largest_mask"),
    Row("cu_seqlens are validated", "kernels/attention/validate.py", "cu_seqlens_q[-1] != num_tokens", "cu_seqlens_q[-1] > num_tokens", "tests/attention/test_attention_validate.py"),
    Row("the mask has one type", "kernels/attention/dense.py", "block_diagonal_mask(parts, options.reach))\n", "block_diagonal_mask(parts, options.reach)).astype(mx.float32)\n", "tests/attention/test_attention.py"),
    Row("a fraction of memory", "engine/memory.py", "room = int(share * memory) - taken", "room = int(memory) - taken", "tests/engine/test_memory.py"),
    Row("preemption forced", "engine/memory.py", "(share or (AUTO_SHARE_GPU if on_gpu else AUTO_SHARE_CPU))", "(AUTO_SHARE_GPU if on_gpu else AUTO_SHARE_CPU)", "tests/engine/test_memory.py::test_a_small_share_of_memory_forces_preemptions"),
    Row("one function with the arguments", "kernels/attention/paged_varlen.py", "softmax_scale=softmax_scale,", "softmax_scale=softmax_scale * 1.01,", METAL + "test_metal_kernel_backend.py::test_public_function_through_msl"),
    Row("the triangle of tests", "kernels/attention/metal/find_seq_idx.metal", "[middle] <= row", "[middle] < row", METAL + "test_metal_kernel_triangle.py"),
    Row("`find_seq_idx`", "kernels/attention/metal/find_seq_idx.metal", "[middle] <= row", "[middle] < row", METAL + "test_metal_kernel_triangle.py"),
    Row("online softmax, window", "kernels/attention/metal/tile.metal", "scoring.softcap * tanh(scores[group].thread_elements()[0])", "scoring.softcap * scores[group].thread_elements()[0]", METAL + "test_metal_kernel_triangle.py"),
    Row("the partition of long contexts", "kernels/attention/work_list.py", "kv_end = np.minimum(kv_end[item], cut + kv_split)", "kv_end = np.minimum(kv_end[item], cut + kv_split + 1)", "tests/attention/test_work_list.py"),
    Row("a prebuilt map", "kernels/attention/work_list.py", "kv_end = first_position + num_rows", "kv_end = first_position + num_rows - 1", "tests/attention/test_work_list.py"),
    Row("faults that were found later", "kernels/attention/metal/merge_splits.metal", "float maximum = -INFINITY;", "float maximum = 0.0f;", METAL + "test_metal_kernel_mutants.py"),
    Row("`max_num_partial_prefills` prompts", "scheduler/partial_prefills.py", "plan.limit(self.share,", "plan.limit(plan.num_tokens,", SHARES + "test_the_budget_is_shared_out_evenly"),
    Row("what a short prompt leaves", "scheduler/partial_prefills.py", "while cut and budget > 0 and progress:", "while False:", SHARES + "test_what_a_short_prompt_leaves_goes_to_the_others_in_the_same_step"),
    Row("`max_long_partial_prefills`", "scheduler/partial_prefills.py", "self._num(self._long) >= self._max_long:", "self._num(self._long) > self._max_long:", SHARES + "test_long_means_uncached"),
    Row("`long_prefill_token_threshold`", "scheduler/partial_prefills.py", "config.long_prefill_token_threshold or config.token_budget", "config.token_budget", SHARES + "test_long_means_over_the_threshold"),
    Row("a long prompt that is passed over", "scheduler/partial_prefills.py", "OVERTAKING_SHARE = 0.07", "OVERTAKING_SHARE = 7.0", SHARES + "test_a_flood_of_short_prompts_puts_a_long_one_off_by_a_bounded_amount"),
    Row("is a request a long prefill now", "trace/readings/prefills.py", "left > (threshold or step.token_budget)", "left > step.token_budget", "tests/readings/test_prefills.py::test_they_are_those_that_the_scheduler_counted"),
    Row("the starving prompt", "scheduler/partial_prefills.py", "self._num(self._long) >= self._max_long:", "False:", SHARES + "test_starving_case_with_one_long_prompt_at_a_time"),
    Row("progress across steps", "scheduler/scheduler.py", "        request.num_kv_computed = end\n", "        request.num_kv_computed = end if samples else chunk.start\n", BUGS + "test_progression_of_a_prompt"),
    Row("a chunk is the last one", "scheduler/scheduler.py", "samples = end >= len(request.token_ids) + request.num_ahead", "samples = end >= request.num_prompt_tokens", BUGS + "test_b01_a_resumed_request_computes_its_output_again_and_samples_only_at_its_end"),
    Row("slots begin in the middle", "engine/packed_batch.py", "np.int64(block_size) + offset", "np.int64(block_size) + offset - offset[np.searchsorted(row_seq, row_seq)]", PACKED + "test_exact_layout"),
    Row("nothing is sampled before", "scheduler/scheduler.py", "samples = end >= len(request.token_ids) + request.num_ahead", "samples = True", BUGS + "test_b09_no_token_leaves_before_the_final_chunk_and_none_is_lost"),
    Row("chunks use up the budget", "scheduler/scheduler.py", "return budget - plan.num_tokens", "return budget - plan.num_tokens // 4 * 4 - 4", BUGS + "test_b20_chunks_use_the_budget_up_without_slivers_or_rounding"),
    Row("`max_num_seqs` holds", "scheduler/scheduler.py", "len(queues.running) >= self.max_running:\n                break", '(len(queues.running) >= self.max_running and request.status != "preempted"):\n                break', "tests/scheduler/test_scheduler.py::test_a_resumed_request_takes_a_seat_like_any_other"),
    Row("decodes continue beside chunks", "scheduler/scheduler.py", 'if request.status != "running":  # preempted for a request before it', 'if request.status != "running" or (not request.is_prefill and any(r.is_prefill for r in self.queues.running)):', BUGS + "test_b15_decodes_go_on_while_a_long_prompt_is_prefilled"),
    Row("`get_next_batch_info`", "scheduler/scheduler.py", "return batch.has_prefill, batch.num_tokens", "return batch.has_prefill, batch.num_tokens + sum(chunk.num_cached_tokens for chunk in batch.chunks)", "tests/scheduler/test_scheduler.py::test_peek_does_not_count_tokens_that_the_prefix_cache_has"),
    Row("no default that calls share", "kernels/attention/dense.py", "parts: list[Part], reach: int = -1)", "parts: list[Part] = [], reach: int = -1)", LINT),
    Row("a step looks at no request", "scheduler/scheduler.py", "        request, end = chunk.request, chunk.start + chunk.num_tokens\n", "        request, end = chunk.request, chunk.start + chunk.num_tokens\n        for other in self.queues.running:\n            if other.request_id == request.request_id:\n                break\n", "tests/scheduler/test_scheduling_work.py::test_a_step_takes_work_in_proportion_to_its_requests"),
    Row("slots are computed for all rows", "engine/packed_batch.py", "    row_seq = np.repeat(np.arange(num_seqs), length)\n", "    row_seq = np.array([seq for seq in range(num_seqs) for _ in range(int(length[seq]))])\n", "tests/scheduler/test_scheduling_work.py::test_packing_takes_no_more_work_for_more_rows"),
    Row("data-parallel engines", "engine/distributed/lockstep.py", "return max(self.num_tokens)", "return min(self.num_tokens)", "tests/distributed/test_distributed.py::test_a_rank_without_work_runs_as_many_tokens_as_the_busiest_rank"),
    Row("lockstep with sliding windows", "engine/distributed/lockstep.py", "by_group=tuple(map(tables, groups)) if len(groups) > 1 else (),", "by_group=(),", "tests/distributed/test_distributed.py::test_a_dummy_batch_has_a_table_for_each_kv_cache_group"),
)  # fmt: skip

SHOWN_OTHERWISE = {
    "sonnet, 1,024 in": "a table of measurements",
    "this version beside the last": "a table of measurements",
    "the earlier design": "an arm of a benchmark",
    "the table of `vllm bench serve`": "vLLM's own function, in its environment: make test-vllm",
    "tokens equal to mlx-lm's": "a field of measurements; the engine's tests compare logits",
    "its workloads": "a table of measurements",
    "the 16k, 32k and 64k arms": "a table of measurements",
    "its advice": "a page",
}
"""Rows without a test, and what shows them."""


def is_found(row: Row, root: Path) -> bool:
    """Whether the test of a row fails with its fault, in a copy of the checkout."""
    with planted(Fault(row.file, row.old, row.new, row.test), root) as path:
        if row.test == LINT:
            command = [sys.executable, "-m", "ruff", "check", "--quiet", str(path)]
        else:
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", row.test]
        return subprocess.run(command, cwd=root, capture_output=True).returncode == 1


def main() -> int:
    """Plant, run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="", help="rows that begin so only")
    options = parser.parse_args()
    chosen = [row for row in ROWS if row.item.startswith(options.row)]
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        copy_checkout(Path(folder))
        for row in chosen:
            found = is_found(row, Path(folder))
            lost += not found
            print(f"{'found' if found else 'NOT FOUND'}  {row.item}: {row.name}", flush=True)
    print(f"{len(chosen) - lost} of {len(chosen)} found")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
