"""An engine in a process that was forked from its own: a clear error, and no wait for threads that are not there."""

import os
import re
import select
import signal
import subprocess
import sys
import warnings

import pytest

from workbench import Engine

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

SECONDS = 60
REFUSAL = (
    rf"RuntimeError: process \d+ is a fork of process {os.getpid()}, in which MLX has computed, and has none of its "
    r'threads: start it with multiprocessing.get_context\("spawn"\) and make an Engine there, or fork first'
)

USES = {
    "step": lambda engine: engine.step(),
    "run": lambda engine: engine.run(progress=False),
    "start": lambda engine: engine.start(),
    "pause": lambda engine: engine.pause(),
    "stream": lambda engine: list(engine.stream([5, 6], None)),
    "generate": lambda engine: engine.generate([[5, 6]], max_tokens=2),
}


def in_a_fork(use):
    """The repr of what a function returns or raises in a forked process; fails the test if it hangs."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks with threads
        child = os.fork()
    if child == 0:
        try:
            said = repr(use())
        except BaseException as problem:
            said = f"{type(problem).__name__}: {problem}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], SECONDS)
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    said = os.read(reader, 65536).decode()
    os.close(reader)
    assert ready, f"the forked process gave no answer in {SECONDS} s"
    return said


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize("name", USES)
def test_a_use_in_a_fork_names_the_process_and_what_to_do(tiny_llama, name, is_running):
    with Engine(tiny_llama, num_blocks=64) as engine:
        engine.add_request([3, 4, 5], max_tokens=4)
        engine._loop._running = is_running  # a background run at the moment of the fork
        said = in_a_fork(lambda: USES[name](engine))
        engine._loop._running = False
        assert re.fullmatch(REFUSAL, said)
        assert engine.run(progress=False)[0].finish_reason is not None, "the first process can use it as before"


def test_what_needs_no_thread_works_in_a_fork_and_closing_does_nothing(tiny_llama):
    with Engine(tiny_llama, num_blocks=64) as engine:
        tokens = engine.generate([[3, 4, 5]], max_tokens=4)[0].token_ids

        def use():
            steps = len(engine.trace)
            engine.close()
            engine._thread.close()  # as the garbage collector does
            return steps, tokens

        assert in_a_fork(use) == repr((len(engine.trace), tokens))


def test_a_new_engine_in_a_fork_is_refused_if_mlx_has_computed(tiny_llama):
    assert re.fullmatch(REFUSAL, in_a_fork(lambda: Engine(tiny_llama, num_blocks=64)))


def test_a_process_that_forks_first_has_an_engine_in_each_fork():
    program = """
import os, sys
sys.path.insert(0, "tests/support")
from word_llama import make_tiny_llama
from workbench import Engine
child = os.fork()
with Engine(make_tiny_llama(), num_blocks=64) as engine:
    print(engine.generate([[3, 4, 5]], max_tokens=4)[0].token_ids, flush=True)
if child:
    os.waitpid(child, 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=5 * SECONDS)
    first, second = done.stdout.splitlines()
    assert first == second, done.stderr
