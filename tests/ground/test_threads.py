"""The number of threads of compiled code and of the BLAS."""

import os

import pytest

from workbench.base import threads
from workbench.base.threads import num_threads, physical_cores


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    monkeypatch.delenv("WORKBENCH_THREADS", raising=False)
    monkeypatch.delenv("WORKBENCH_BLAS_THREADS", raising=False)
    threads.free_cores.cache_clear()
    yield
    threads.free_cores.cache_clear()


@pytest.mark.parametrize(("load", "expected"), [(0.0, 4), (0.4, 4), (0.6, 3), (2.9, 1), (25.0, 1)])
def test_busy_cores_are_left_to_others(load, expected, monkeypatch):
    monkeypatch.setattr(threads, "physical_cores", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert num_threads() == expected


def test_the_number_stays_when_the_load_changes(monkeypatch):
    monkeypatch.setattr(threads, "physical_cores", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert num_threads() == 4
    monkeypatch.setattr(os, "getloadavg", lambda: (4.0, 0.0, 0.0))
    assert num_threads() == 4


def test_two_threads_of_a_core_count_once(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5}, raising=False)
    monkeypatch.setattr(threads, "_siblings", lambda number: {0: "0-1", 1: "0-1", 2: "2-3"}.get(number, ""))
    assert physical_cores() == 3


def test_this_machine_has_a_core():
    assert 1 <= physical_cores() <= os.cpu_count()


def test_the_new_variable_goes_before_the_old_one(monkeypatch):
    monkeypatch.setenv("WORKBENCH_BLAS_THREADS", "3")
    with pytest.warns(DeprecationWarning, match="set WORKBENCH_THREADS"):
        assert num_threads() == 3
    monkeypatch.setenv("WORKBENCH_THREADS", "2")
    assert num_threads() == 2
