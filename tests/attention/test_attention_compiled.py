"""Compiled code is kept on disk and never used for other sources."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from workbench.attention.cpu import compiled


@compiled.entry_point
def double(x):
    return 2 * x


def test_code_is_kept_in_a_folder_of_its_sources(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    entry = compiled.entry_point(double.py_func)
    assert entry(np.float32(3)) == 6
    kept = list((tmp_path / "numba" / compiled._source_digest(Path(__file__).parent)).rglob("*.nbc"))
    assert len(kept) == 1
    again = compiled.entry_point(double.py_func)
    assert again(np.float32(3)) == 6 and sum(again.stats.cache_hits.values()) == 1

    monkeypatch.setattr(compiled, "_source_digest", lambda sources: "other")
    other = compiled.entry_point(double.py_func)
    assert other(np.float32(3)) == 6 and sum(other.stats.cache_hits.values()) == 0


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("WORKBENCH_CACHE", str(blocked))
    assert compiled.entry_point(double.py_func)(np.float32(3)) == 6
