"""The playground's size and speed: the download, the time to the first picture, and from a slider to the picture.

    workbench playground --fetch
    python benchmarks/bench_playground.py [--save]

The browser is headless Chromium without a GPU, and the server is on the same machine, so the download itself takes no
time. "Cold" is a browser with an empty cache, "warm" the same page loaded again. The time from a slider to the picture
is that from the event of the slider, through the simulation, to the second animation frame after the packet was taken.
CPU seconds are those of all processes of the browser: on a machine with other work they say more than the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Any

from _common import chromium, save
from playwright.sync_api import Page, sync_playwright

from workbench.apps.playground import server, site

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]

FRAME = "await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));"
FIRST_PICTURE = f"""async () => {{
  while (!(globalThis.playground?.view && !playground.busy)) await new Promise((done) => setTimeout(done, 5));
  {FRAME}
  return performance.now();
}}"""
SLIDE = f"""async ([name, value]) => {{
  const control = playground.settings.controls.find((control) => control.name === name);
  control.range.value = control.steps.indexOf(value);
  const began = performance.now();
  control.range.dispatchEvent(new Event("input"));
  while (playground.running || playground.stale) await new Promise((done) => setTimeout(done, 0));
  {FRAME}
  return [performance.now() - began, 1000 * playground.facts.seconds, playground.facts.num_steps];
}}"""


def cpu_seconds() -> float:
    """CPU time of all processes that this one has started, and of theirs, which are the browser's."""
    parents, times = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(path.parent.name)] = int(fields[1])
        times[int(path.parent.name)] = int(fields[11]) + int(fields[12])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(times[pid] for pid in ours - {os.getpid()}) / os.sysconf("SC_CLK_TCK")


def first_picture(page: Page, address: str | None) -> tuple[float, float]:
    """Seconds from the navigation to the picture, and the browser's CPU seconds; None loads the page again."""
    before = cpu_seconds()
    page.reload() if address is None else page.goto(address)
    return page.evaluate(FIRST_PICTURE) / 1000, cpu_seconds() - before


def slider(page: Page, preset: str, moves: int) -> dict[str, Any]:
    """Milliseconds from a slider to the picture, and the part that the simulation takes."""
    page.select_option("#preset", preset)
    page.wait_for_function("() => !playground.busy && !playground.running")
    budgets = (256, 384, 512, 768, 1024)
    found = []
    for i in range(moves):
        if i == 2:
            before = cpu_seconds()
        found.append(page.evaluate(SLIDE, ["max_num_batched_tokens", budgets[i % len(budgets)]]))
    cpu = cpu_seconds() - before
    totals, simulations, steps = zip(*found[2:])
    return {
        "moves": len(totals),
        "picture_ms_median": statistics.median(totals),
        "picture_ms_min": min(totals),
        "picture_ms_max": max(totals),
        "browser_cpu_ms_per_move": 1000 * cpu / len(totals),
        "simulation_ms_median": statistics.median(simulations),
        "steps": [min(steps), max(steps)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="cold and warm loads")
    parser.add_argument(
        "--moves", type=int, default=17, help="moves of the slider, the first two of which do not count"
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/playground.json")
    options = parser.parse_args()
    program = chromium()
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        sizes = site.build(Path(name))
        results: dict[str, Any] = {"download_bytes": sum(sizes.values()), "files": sizes}
        service = server.make_server(Path(name))
        threading.Thread(target=service.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{service.server_port}/"
        browser = driver.chromium.launch(executable_path=program, args=ARGUMENTS)
        results["browser"] = browser.version
        cold, warm = [], []
        for _ in range(options.runs):
            context = browser.new_context(viewport={"width": 1440, "height": 900})
            page = context.new_page()
            cold.append(first_picture(page, address))
            warm.append(first_picture(page, None))
            for name, (wall, cpu) in (("cold", cold[-1]), ("warm", warm[-1])):
                print(f"first picture, {name}: {wall:.2f} s, browser {cpu:.2f} s CPU", flush=True)
            if len(cold) == options.runs:
                results["slider_200_requests"] = slider(page, "two-hundred", options.moves)
                results["slider_2_requests"] = slider(page, "chunked", options.moves)
            context.close()
        browser.close()
        service.shutdown()
    for name, loads in (("cold", cold), ("warm", warm)):
        walls, cpus = zip(*loads)
        results[f"first_picture_{name}"] = {"median_s": statistics.median(walls), "s": walls, "browser_cpu_s": cpus}
    results["load_average"] = os.getloadavg()
    for name in ("download_bytes", "slider_200_requests", "slider_2_requests"):
        print(name, results[name])
    if options.save:
        save("playground", results)


if __name__ == "__main__":
    main()
