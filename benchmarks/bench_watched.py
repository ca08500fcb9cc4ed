"""The cost of observation: the same requests with the record off, on, saved during the run, and a dashboard open.

"off" is for comparison only: the record cannot be switched off, so this arm stubs out its creation (the step's record,
the description of the kernel launch, the append to the trace). "saved" also writes every step to a file
while the engine runs (``trace.record_to``). "dashboard" serves the page from the engine's process to headless Chromium,
which is a separate process: CPU time counts only the engine's process, but both share the machine's cores.

Each run is a separate process, arms are interleaved, and medians are saved after every repeat to
benchmarks/results/watched.json. 5 repeats take about 6 minutes on two cores.

    python benchmarks/bench_watched.py
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ARMS = ("on", "off", "saved", "dashboard")
NUM_REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 16, 96, 32
CHROMIUM_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


def add_requests(engine: Any, seed: int, count: int = NUM_REQUESTS, output_tokens: int = OUTPUT_TOKENS) -> None:
    generator = random.Random(seed)
    for _ in range(count):
        prompt = [generator.randrange(100, 40000) for _ in range(INPUT_TOKENS)]
        engine.add_request(prompt, max_tokens=output_tokens, ignore_eos=True)


def switch_record_off(engine: Any) -> None:
    """Replace the creation and storage of records with the minimum that the engine's loop needs."""
    from workbench.models.served_model import ServedModel
    from workbench.scheduler.batch import ScheduledBatch
    from workbench.trace import StepRecord

    ScheduledBatch.to_record = lambda batch, *args, **kwargs: StepRecord(batch.step)
    ServedModel.launch = lambda *args, **kwargs: None
    engine.trace.append = lambda record: None


def serve_dashboard(engine: Any, stack: ExitStack) -> str:
    """Wait until the engine's dashboard accepts connections; return its address."""
    from workbench.viz import app

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()
    stack.callback(app.serve(engine, port=address[1], threaded=True).stop)
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(address).close()
            return f"http://127.0.0.1:{address[1]}/"
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def run_arm(arm: str) -> None:
    """Serve the requests in this process and print the result."""
    from workbench import Engine, EngineConfig

    with ExitStack() as stack:
        engine = Engine("smollm2", EngineConfig(max_num_batched_tokens=128, max_num_seqs=16, num_blocks=256))
        stack.callback(engine.close)
        add_requests(engine, seed=1, count=2, output_tokens=3)
        engine.run(progress=False)  # compiled kernels, warm weights
        if arm == "off":
            switch_record_off(engine)
        elif arm == "saved":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(engine.trace.record_to(Path(folder) / "trace.jsonl.gz"))
        elif arm == "dashboard":
            print(serve_dashboard(engine, stack), flush=True)
            sys.stdin.readline()  # the page is open
        add_requests(engine, seed=0)
        wall, cpu = time.perf_counter(), time.process_time()
        engine.start()
        while engine.state == "running":
            time.sleep(0.02)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        tokens = sum(len(output.token_ids) for output in engine.outputs.values()) - 2 * 3
    print(json.dumps({"cpu_s": cpu, "wall_s": wall, "output_tokens_per_s": tokens / wall, "output_tokens": tokens}))


def measure(arm: str, browser: Any) -> dict[str, float]:
    """Run one arm in a separate process, with an open page if the arm has one."""
    command = [sys.executable, __file__, "--arm", arm]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        page = None
        if arm == "dashboard":
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.goto(process.stdout.readline().strip())
            page.wait_for_selector(".wb-root")
            page.wait_for_timeout(1500)
            process.stdin.write("\n")
            process.stdin.flush()
        while page is not None and process.poll() is None:
            page.wait_for_timeout(100)  # lets the driver's messages through
        printed = process.stdout.read()
        if page is not None:
            page.close()
    if process.returncode:
        raise RuntimeError(f"arm {arm!r} ended with status {process.returncode}")
    return json.loads(printed.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        run_arm(options.arm)
        return
    from _common import before_arm, chromium, save, summarise
    from playwright.sync_api import sync_playwright

    program = chromium()
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=CHROMIUM_ARGUMENTS)
        for repeat in range(options.repeats):
            # The order changes with each repeat, so that no arm always follows the same one.
            for arm in ARMS[repeat % len(ARMS) :] + ARMS[: repeat % len(ARMS)]:
                before_arm(arm)
                result = measure(arm, browser)
                runs[arm].append(result)
                print(f"{repeat} {arm:10s} cpu {result['cpu_s']:6.2f} s  wall {result['wall_s']:6.2f} s", flush=True)
            save(
                "watched",
                {
                    "workload": f"SmolLM2, {NUM_REQUESTS} requests of {INPUT_TOKENS} in, {OUTPUT_TOKENS} out",
                    "browser": browser.version,
                    "arms": {
                        arm: {row: summarise([run[row] for run in runs[arm]]) for row in runs[arm][0]} for arm in ARMS
                    },
                    "cpu_over_record_on": {
                        arm: summarise([a["cpu_s"] / b["cpu_s"] for a, b in zip(runs[arm], runs["on"], strict=True)])
                        for arm in ARMS
                    },
                },
            )
        browser.close()


if __name__ == "__main__":
    main()
