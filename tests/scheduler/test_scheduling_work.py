"""The work of a step grows with its requests, that of packing not with the rows: lines are counted, not time."""

import sys

import numpy as np
import pytest
from scheduler_helpers import add, make_scheduler, step

from workbench.engine.packed_batch import pack


def lines_run(work):
    """The number of lines of Python that a function runs, comprehensions included, on this thread."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("phase", ["admission", "decode"])
def test_a_step_takes_work_in_proportion_to_its_requests(phase):
    """A search among the running requests for each chunk would be a hundred times the work for ten times as many."""

    def lines(num_requests):
        scheduler = make_scheduler(
            max_num_seqs=num_requests, max_num_batched_tokens=10 * num_requests, num_blocks=20 * num_requests
        )
        for index in range(num_requests):
            add(scheduler, f"r{index}", 3, max_tokens=9)
        if phase == "decode":
            for _ in range(2):
                step(scheduler)
        return lines_run(lambda: step(scheduler))

    few, many = lines(40), lines(400)
    assert many < 11 * few


def test_packing_takes_no_more_work_for_more_rows():
    def lines(num_rows):
        table = list(range(1, num_rows // 16 + 2))
        segments = [(table, 3, num_rows, list(range(num_rows)), 1, "a"), (table, 0, 1, [5], 1, "b")]
        return lines_run(lambda: pack(segments, 16))

    assert lines(64) == lines(4096)
    found = pack([([4, 7], 3, 20, list(range(20)), 1, "a")], 16)
    assert np.array_equal(found.slot_mapping, [4 * 16 + i if i < 16 else 7 * 16 + i - 16 for i in range(3, 23)])
