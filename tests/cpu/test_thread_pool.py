"""The pool of threads: who works, what fails, and that nobody works without work."""

import os
import threading
import time

import pytest

from workbench.kernels.cpu.threads import ThreadPool, share, thread_pool


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_thread_works_once(size):
    seen = []
    ThreadPool(size).run(lambda number: seen.append((number, threading.get_ident())))
    assert sorted(number for number, _ in seen) == list(range(size))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_is_raised_and_the_pool_works_on(failing):
    def work(number):
        if number == failing:
            raise ArithmeticError(f"thread {number}")

    pool, seen = ThreadPool(3), []
    with pytest.raises(ArithmeticError, match=f"thread {failing}"):
        pool.run(work)
    pool.run(seen.append)
    assert sorted(seen) == [0, 1, 2]


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="no clocks of single threads here")
def test_an_idle_pool_uses_no_processor_time():
    pool, idents = ThreadPool(4), []
    pool.run(lambda number: idents.append(threading.get_ident()) if number else None)
    clocks = [time.pthread_getcpuclockid(ident) for ident in idents]
    time.sleep(0.3)
    assert len(clocks) == 3
    assert max(map(time.clock_gettime, clocks)) < 0.1  # a thread that spins takes 0.3


@pytest.mark.parametrize("size", [1, 3, 8])
def test_shares_cover_everything_once(size):
    for count in (0, 1, 7, 64):
        parts = [range(*share(count, thread, size)) for thread in range(size)]
        assert [index for part in parts for index in part] == list(range(count))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_gets_threads_again():
    pool = thread_pool(2)
    child = os.fork()
    if child == 0:
        os._exit(0 if thread_pool(2) is not pool else 1)
    assert os.waitpid(child, 0)[1] == 0
