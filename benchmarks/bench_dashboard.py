"""The cost of the dashboard: browser time per update, frames per second, engine throughput, opening, first picture.

    python benchmarks/bench_dashboard.py [--skip-engine] [--save]

The browser is headless Chromium without a GPU, so the CPU draws every pixel; a desktop browser has less work.
Browser time is ``TaskDuration`` of the DevTools protocol (CPU time of the main thread: script, style, layout, paint).
Bytes are the websocket frames received. Frames per second are also measured on an empty page under the same load: this
is the browser's maximum on this machine, and the dashboard's frames are reported as a share of it.
"""

from __future__ import annotations

import argparse
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from _common import chromium, save
from playwright.sync_api import Page, sync_playwright

from workbench import simulate
from workbench.trace import Trace
from workbench.viz import app

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
UPDATES_PER_SECOND = 10


class PacedController:
    """Append the steps of a recorded trace at a fixed rate: the load without the engine."""

    name = "paced"

    def __init__(self, recorded: Trace) -> None:
        self.recorded, self.trace, self.state = recorded, Trace(recorded.meta), "paused"
        for info in recorded.requests.values():
            self.trace.add_request(info)

    def append(self) -> None:
        self.trace.append(self.recorded[len(self.trace)])

    def start(self) -> None:
        """Do nothing: the benchmark paces the steps."""

    pause = step = start


def serve(source: Any) -> tuple[Any, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return app.serve(source, port=port, threaded=True), f"http://127.0.0.1:{port}/"


def wait_for_steps(page: Page, steps: int) -> None:
    page.wait_for_selector(".wb-root")
    root = page.locator(".wb-root").first.element_handle()
    page.wait_for_function("([root, n]) => root.workbench.store.numSteps >= n", arg=[root, steps], timeout=60_000)


class MainThread:
    """CPU seconds of the page's main thread, from the DevTools protocol."""

    def __init__(self, page: Page) -> None:
        self._session = page.context.new_cdp_session(page)
        # CPU time of the thread: wall time would include other processes of this machine.
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def seconds(self) -> float:
        metrics = self._session.send("Performance.getMetrics")["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")


COUNT_FRAMES = "() => { window.frames_ = 0; (function count() { window.frames_++; requestAnimationFrame(count); })(); }"


def empty_page_frames_per_second(browser: Any, seconds: float) -> float:
    """The control: frames per second of an empty page."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.evaluate(COUNT_FRAMES)
    frames, started = page.evaluate("window.frames_"), time.perf_counter()
    page.wait_for_timeout(seconds * 1000)
    result = (page.evaluate("window.frames_") - frames) / (time.perf_counter() - started)
    page.close()
    return result


def live_updates(browser: Any, seconds: float) -> dict[str, float]:
    """Measure ten updates of one step each per second, with 64 requests and 16,384 blocks."""
    rng = random.Random(0)
    requests = [
        {"id": f"r{i}", "prompt": {"len": rng.randint(100, 3000)}, "max_tokens": 2000, "arrival_step": i // 2}
        for i in range(64)
    ]
    config = {"num_blocks": 16384, "max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 8192}
    recorded = simulate({"config": config, "requests": requests}, max_steps=600)
    controller = PacedController(recorded)
    for _ in range(120):
        controller.append()
    server, address = serve(controller)
    empty = [empty_page_frames_per_second(browser, seconds / 4)]
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    sizes: list[int] = []
    page.on("websocket", lambda ws: ws.on("framereceived", lambda frame: sizes.append(len(frame))))
    page.goto(address)
    wait_for_steps(page, 120)
    page.wait_for_timeout(1500)
    page.evaluate(COUNT_FRAMES)
    main_thread = MainThread(page)
    idle_start = main_thread.seconds()
    page.wait_for_timeout(2000)
    idle = (main_thread.seconds() - idle_start) / 2
    updates = int(seconds * UPDATES_PER_SECOND)
    sizes.clear()
    frames, before, started = page.evaluate("window.frames_"), main_thread.seconds(), time.perf_counter()
    stop = threading.Event()

    def feed() -> None:
        for _ in range(updates):
            controller.append()
            if stop.wait(1 / UPDATES_PER_SECOND):
                return

    thread = threading.Thread(target=feed)
    thread.start()
    page.wait_for_timeout(seconds * 1000)
    thread.join()
    elapsed = time.perf_counter() - started
    spent = main_thread.seconds() - before - idle * elapsed
    drawn = page.evaluate("window.frames_") - frames
    wait_for_steps(page, 120 + updates)
    page.close()
    server.stop()
    empty.append(empty_page_frames_per_second(browser, seconds / 4))
    return {
        "updates": updates,
        "browser_ms_per_update": spent / updates * 1e3,
        "kilobytes_per_update": sum(sizes) / updates / 1e3,
        "frames_per_second": drawn / elapsed,
        "frames_per_second_of_an_empty_page": statistics.mean(empty),
        "share_of_its_frames": drawn / elapsed / statistics.mean(empty),
        "idle_browser_ms_per_second": idle * 1e3,
    }


MOVE_CURSOR = """async ([root, step]) => {
    root.workbench.cursor.seek(step);
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
}"""


def opening(browser: Any) -> dict[str, float]:
    """Measure a page with 20,000 steps: the time to its first picture, and the time of a cursor move."""
    rng = random.Random(1)
    requests = [
        {
            "id": f"r{i}",
            "prompt": {"len": rng.randint(20, 400)},
            "max_tokens": rng.randint(50, 800),
            "arrival_step": i * 17,
        }
        for i in range(1150)
    ]
    config = {"num_blocks": 4096, "max_num_seqs": 24, "max_num_batched_tokens": 512, "max_model_len": 8192}
    trace = simulate({"config": config, "requests": requests}, max_steps=20_000)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.html"
        start = time.perf_counter()
        trace.to_html(path)
        written = time.perf_counter() - start
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        opened = []
        for _ in range(3):
            start = time.perf_counter()
            page.goto(f"file://{path}")
            wait_for_steps(page, len(trace))
            page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            opened.append(time.perf_counter() - start)
        size = path.stat().st_size
    far = [(i * 7919) % len(trace) for i in range(60)]
    near = range(len(trace) // 2, len(trace) // 2 + 60)
    main_thread, root = MainThread(page), page.locator(".wb-root").first.element_handle()

    def cursor_moves(steps: Any) -> list[float]:
        """Milliseconds of the main thread for each cursor move and its frame, in ascending order."""
        costs = []
        for step in steps:
            before = main_thread.seconds()
            page.evaluate(MOVE_CURSOR, [root, step])
            costs.append((main_thread.seconds() - before) * 1e3)
        return sorted(costs)

    far_moves, near_moves = cursor_moves(far), cursor_moves(near)
    page.close()
    chunks = sum(len(record.chunks) for record in trace)
    return {
        "steps": len(trace),
        "chunks": chunks,
        "megabytes": size / 1e6,
        "write_seconds": written,
        "open_seconds": statistics.median(opened),
        "cursor_move_to_anywhere_ms_median": statistics.median(far_moves),
        "cursor_move_to_anywhere_ms_p95": far_moves[int(0.95 * len(far_moves))],
        "cursor_move_to_the_next_step_ms_median": statistics.median(near_moves),
        "cursor_move_to_the_next_step_ms_p95": near_moves[int(0.95 * len(near_moves))],
    }


def engine_throughput(browser: Any, pairs: int) -> dict[str, Any]:
    """Serve the same requests with SmolLM2, alternately with and without an open dashboard.

    The ratio of the CPU times of the engine's process (engine, server and packets, without the browser) is the cost of
    the dashboard for the engine. Wall time also includes the browser and all other programs on the machine.
    """
    from workbench import Engine, EngineConfig

    def run(with_page: bool) -> tuple[float, float]:
        engine = Engine("smollm2", EngineConfig(max_num_batched_tokens=256, max_num_seqs=32, num_blocks=1024))
        server = page = None
        if with_page:
            server, address = serve(engine)
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.goto(address)
            page.wait_for_selector(".wb-root")
            page.wait_for_timeout(1000)
        for i in range(16):
            engine.add_request(f"Count from {i} upwards:", max_tokens=24, ignore_eos=True)
        wall, cpu = time.perf_counter(), time.process_time()
        engine.start()
        while engine.state == "running":
            if page is not None:
                page.wait_for_timeout(200)
            else:
                time.sleep(0.2)
        spent = time.perf_counter() - wall, time.process_time() - cpu
        if page is not None:
            page.close()
            server.stop()
        engine.close()
        label = "with" if with_page else "without"
        print(f"  {label} the dashboard: {spent[0]:.2f} s wall, {spent[1]:.2f} s CPU", flush=True)
        return spent

    run(False)
    wall_ratios, cpu_ratios = [], []
    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        times = {with_page: run(with_page) for with_page in order}
        wall_ratios.append(times[True][0] / times[False][0])
        cpu_ratios.append(times[True][1] / times[False][1])
    return {
        "pairs": pairs,
        "cpu_ratio_median": statistics.median(cpu_ratios),
        "cpu_ratios": cpu_ratios,
        "wall_ratio_median": statistics.median(wall_ratios),
        "wall_ratios": wall_ratios,
    }


def first_picture(browser: Any) -> dict[str, Any]:
    """Measure ``workbench demo``: the time from the address it prints to a picture with its first sentence."""
    runs = []
    for _ in range(3):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "workbench", "demo", "--no-browser", "--port", str(port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
            assert demo.stdout is not None
            next(line for line in demo.stdout if line.startswith("dashboard:"))
            start = time.perf_counter()
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(f"http://127.0.0.1:{port}")
            page.locator(".wb-root canvas:visible").first.wait_for()
            page.locator(".wb-sentence").filter(has_text="Step").first.wait_for()
            runs.append(time.perf_counter() - start)
            page.close()
            demo.terminate()
    return {"seconds": statistics.median(runs), "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10, help="length of the live measurement")
    parser.add_argument("--pairs", type=int, default=3, help="runs with and without the dashboard")
    parser.add_argument("--skip-engine", action="store_true", help="leave out the part that needs the bundled model")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/dashboard.json")
    options = parser.parse_args()
    program = chromium()
    results: dict[str, Any] = {}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=ARGUMENTS)
        results["browser"] = browser.version
        for name, measure in (
            ("live_64_requests_16384_blocks", lambda: live_updates(browser, options.seconds)),
            ("open_20000_steps", lambda: opening(browser)),
            ("engine", lambda: None if options.skip_engine else engine_throughput(browser, options.pairs)),
            ("first_picture", lambda: None if options.skip_engine else first_picture(browser)),
        ):
            results[name] = measure()
            print(name, results[name], flush=True)
        browser.close()
    if options.save:
        save("dashboard", results)


if __name__ == "__main__":
    main()
