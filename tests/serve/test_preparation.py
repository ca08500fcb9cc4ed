"""Texts are tokenized beside everything else: Python's lock is free, and long texts wait only for long ones."""

import asyncio
import contextlib
import gc
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from workbench.apps.serve.errors import ApiError
from workbench.apps.serve.preparation import LONG_BODY, MAX_WAITING, Preparation


def ticks_during(work):
    """Number of times that another thread ran in the middle of some work, and the result of the work."""
    times, over = [], threading.Event()

    def tick():
        while not over.is_set():
            time.sleep(0.001)
            times.append(time.perf_counter())

    ticker = threading.Thread(target=tick)
    ticker.start()
    time.sleep(0.02)
    start = time.perf_counter()
    result = work()
    took = time.perf_counter() - start
    over.set()
    ticker.join()
    return sum(start + took / 10 < moment < start + took * 9 / 10 for moment in times), result


def run_in_a_thread(coroutine):
    """Run to the end where no event loop runs yet: Playwright keeps one in the main thread."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(asyncio.run, coroutine).result()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a niceness for each thread")
def test_long_texts_give_way_to_short_ones():
    def niceness():
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    async def prepare():
        preparation = Preparation(60)
        now = niceness()
        assert await preparation.run(niceness, LONG_BODY - 1) == now
        assert await preparation.run(niceness, LONG_BODY) == min(19, now + 10)
        preparation.close()

    run_in_a_thread(prepare())


@pytest.mark.parametrize("letter", ["a", "1", " ", "日"])
def test_a_long_text_leaves_pythons_lock_to_others(smollm2, letter):
    tokenizer = smollm2.tokenizer
    for _ in range(10):  # the other thread needs a processor too, which a busy machine may not give it at once
        ticks, ids = ticks_during(lambda: tokenizer.encode(letter * 100_000))
        if ticks >= 5:
            break
    assert ticks >= 5, "another thread could not run while a text was tokenized"
    assert tokenizer.decode(ids) == letter * 100_000


def test_a_long_text_has_the_same_tokens_as_a_short_one(smollm2, monkeypatch):
    from workbench.models.gguf import byte_level

    text = "".join(f"{number} lines, <|im_start|>é\\n  日本 {number * 7} " for number in range(500))
    expected = smollm2.tokenizer.encode(text)
    monkeypatch.setattr(byte_level, "_LONG_TEXT", 10**9)
    assert smollm2.tokenizer.encode(text) == expected and len(expected) > 5000


@contextlib.contextmanager
def blocked():
    """A preparation, and a gate that all work behind it waits for."""
    preparation, gate = Preparation(60.0), threading.Event()
    try:
        yield preparation, gate
    finally:
        gate.set()
        preparation.close()


def test_short_texts_do_not_wait_for_long_ones():
    async def main():
        with blocked() as (preparation, gate):
            waiting = [asyncio.ensure_future(preparation.run(gate.wait, LONG_BODY)) for _ in range(MAX_WAITING)]
            await asyncio.sleep(0)
            assert await asyncio.wait_for(preparation.run(lambda: "short", 10), 60) == "short"
            with pytest.raises(ApiError, match="too many long bodies") as error:
                await asyncio.wait_for(preparation.run(gate.wait, LONG_BODY), 60)
            assert error.value.status == 429
            gate.set()
            assert all(await asyncio.gather(*waiting))

    run_in_a_thread(main())


def test_the_text_of_a_client_that_left_is_not_tokenized():
    async def main():
        gone, done = asyncio.Event(), []
        with blocked() as (preparation, gate):
            first = asyncio.ensure_future(preparation.run(gate.wait, LONG_BODY))
            second = asyncio.ensure_future(preparation.run(lambda: done.append(1), LONG_BODY, gone))
            await asyncio.sleep(0.01)
            gone.set()
            with pytest.raises(ApiError, match="disconnected"):
                await asyncio.wait_for(second, 60)
            gate.set()
            await first
            await preparation.run(lambda: None, LONG_BODY)
            assert not done

    run_in_a_thread(main())


def test_work_that_took_too_long_leaves_nothing_in_the_log(caplog):
    def spin():
        while True:
            pass

    async def main():
        preparation = Preparation(0.05)
        with pytest.raises(ApiError, match="took more than"):
            await preparation.run(spin, 1)
        preparation.close()

    run_in_a_thread(main())
    gc.collect()
    assert "never retrieved" not in caplog.text
