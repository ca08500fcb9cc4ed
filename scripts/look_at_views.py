"""Look at what people see.

    python scripts/look_at_views.py DIR [--browsers chromium firefox webkit] [--sizes 390 1440]

Opens the pages that Workbench saves (a run, two runs compared, an incident, a recorded kernel) and the dashboard of an
engine at work, goes through their views, tables, cards, boxes and films, and writes a picture of each into DIR, at four
widths, light and dark. Faults are printed: a page wider than its window, a control or a canvas beyond its edge, words
of a button that are cut, a panel without height. The exit status is 1 if there is any.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import browsers
from browsers import Browser

ROOT = Path(__file__).parents[1]
SIZES = {390: 844, 1100: 900, 1440: 900, 2560: 1300}
PATIENCE = 60.0

FIND = """() => {
  const find = (at) => {
    for (const e of at.querySelectorAll("*")) {
      const found = e.matches(".wb-root") ? e : e.shadowRoot && find(e.shadowRoot);
      if (found) return found;
    }
    return null;
  };
  globalThis.wbRoot = find(document);
  return Boolean(wbRoot?.workbench && (wbRoot.workbench.store?.numSteps ?? 1));
}"""
"""The root of the view, which a served page has in a shadow tree."""

CLICK = """(name) => {
  const isNamed = (b) => (b.ariaLabel || b.textContent).trim().startsWith(name) && b.offsetParent;
  const found = [...wbRoot.querySelectorAll("button, summary")].find(isNamed);
  if (!found) return false;
  found.scrollIntoView({ block: "center" });
  found.click();
  return true;
}"""
FAULTS = """() => {
  const found = [], width = document.documentElement.clientWidth;
  const over = document.documentElement.scrollWidth - width;
  if (over > 1) found.push(`the page is ${over} px wider than the window`);
  const words = (e) => (e.ariaLabel || e.textContent || "").trim().slice(0, 40);
  const name = (e) => `${e.tagName.toLowerCase()}.${e.className} "${words(e)}"`;
  const scrolls = (e) => {
    for (let at = e.parentElement; at; at = at.parentElement) {
      if (/auto|scroll|hidden/.test(getComputedStyle(at).overflowX) && at.scrollWidth > at.clientWidth) return true;
    }
    return false;
  };
  for (const e of wbRoot.querySelectorAll("button:not(.wb-skip), input, select, canvas, h2, h3")) {
    const box = e.getBoundingClientRect(), around = e.closest(".wb-popover")?.getBoundingClientRect();
    if (e.offsetParent && around && box.right > around.right) found.push(`${name(e)} is beyond its box`);
    const isFolded = e.matches("details:not([open]) > :not(summary) *"); // WebKit gives it a place all the same
    if (!e.offsetParent || !box.width || isFolded || scrolls(e)) continue;
    if (box.right > width + 1 || box.left < -1) found.push(`${name(e)} is beyond the edge`);
    const cut = e.matches("button") && e.scrollWidth > e.clientWidth + 2;
    if (cut) found.push(`${name(e)} is cut`);
  }
  for (const panel of wbRoot.querySelectorAll("[data-panel]")) {
    if (panel.offsetParent && panel.offsetHeight < 20) found.push(`panel ${panel.dataset.panel} has no height`);
  }
  return [...new Set(found)];
}"""
DARK = """(dark) => {
  const view = wbRoot.workbench;
  if (!view.theme) return;
  view.theme.choice = dark ? "dark" : "light";
  (view.applyTheme ?? view.drawNow).call(view);
}"""
VIEW = "wbRoot.workbench"

SOURCE = """
uint i = thread_position_in_grid.x;
threadgroup float shared[64];
shared[i % 64] = x[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
y[i] = simd_sum(shared[63 - i % 64]);
"""

State = tuple[str, str]
"""An act, as a JavaScript function or the name of a button after a colon, and the name of the picture."""

RUN: tuple[State, ...] = (
    ("", "first"),
    (f"() => {VIEW}.show('scheduler')", "scheduler"),
    (f"() => {VIEW}.show('kernel')", "kernel"),
    (f"() => {VIEW}.show('all')", "all"),
    (f"() => {VIEW}.toggleTables()", "tables"),
    (
        f"() => ({VIEW}.toggleTables(), {VIEW}.show('story'), {VIEW}.inspector.pin({{ kind: 'request', request: 2 }}))",
        "card",
    ),
    (f"() => ({VIEW}.inspector.close?.(), {VIEW}.film.show())", "film"),
    (f"() => ({VIEW}.film.close(), {VIEW}.cursor.seek({VIEW}.store.numSteps - 1))", "end"),
)
PLAIN: tuple[State, ...] = (("", "first"),)
COMPARE: tuple[State, ...] = (("", "first"), (f"() => {VIEW}.show('all')", "all"))
KERNEL: tuple[State, ...] = (
    ("", "first"),
    (f"() => {VIEW}.seek(Math.floor({VIEW}.run.size / 2))", "middle"),
    (":Table", "table"),
    (f"() => {VIEW}.seek({VIEW}.run.size - 1)", "end"),
)
LIVE: tuple[State, ...] = (
    ("", "first"),
    (f"() => {VIEW}.show('kernel')", "kernel"),
    (f"() => ({VIEW}.show('all'), {VIEW}.ask())", "ask"),
    (":Options", "options"),
    (f"() => ({VIEW}.escape(), {VIEW}.toggleBreakpoints())", "breakpoints"),
    (f"() => ({VIEW}.escape(), {VIEW}.toggleFork())", "what if"),
    (f"() => ({VIEW}.escape(), {VIEW}.toggleTuning())", "which setting"),
    (f"() => ({VIEW}.escape(), {VIEW}.show('story'), {VIEW}.send('step_into'))", "inside a step"),
    (f"() => ({VIEW}.engineDo('start'), {VIEW}.cursor.goLive?.())", "end"),
)


def pages(folder: Path) -> Iterator[tuple[str, tuple[State, ...]]]:
    """Write the pages; yields the name of each and its states."""
    from workbench import Trace, msl, simulate

    import mlx.core as mx  # isort: skip (after workbench, which puts a fast BLAS in its place)
    from workbench.kernels.msl import why_unavailable

    given = {
        "config": {"max_num_batched_tokens": 96, "num_blocks": 40, "max_num_seqs": 6},
        "cost_model": {"fixed": 0.01, "per_prefill_token": 0.0004},
        "requests": [
            {
                "id": f"question {i}",
                "prompt": {"len": 20 + 37 * i % 150},
                "max_tokens": 12 + i,
                "arrival_time": 0.05 * i,
            }
            for i in range(12)
        ],
    }
    run = simulate(given)
    run.to_html(folder / "run.html")
    yield "run", RUN
    run.to_html(folder / "compare.html", other=simulate(given, config={"max_num_batched_tokens": 32}))
    yield "compare", COMPARE
    Trace.load(ROOT / "examples" / "vllm_preemption.jsonl.gz").to_html(folder / "incident.html")
    yield "incident", PLAIN
    if not why_unavailable():
        kernel = msl.metal_kernel("reverse", ["x"], ["y"], SOURCE)
        launch: dict[str, Any] = {"inputs": [mx.arange(256).astype(mx.float32)], "output_shapes": [(256,)]}
        launch |= {"output_dtypes": [mx.float32], "grid": (256, 1, 1), "threadgroup": (64, 1, 1)}
        kernel.record(**launch, threadgroups=[0, 2]).save_html(folder / "lab.html")
        yield "lab", KERNEL


@contextlib.contextmanager
def live_page() -> Iterator[str]:
    """Serve an engine that has stepped three times; gives its address."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from word_llama import make_tiny_llama

    from workbench import Engine, EngineConfig
    from workbench.viz.app import serve

    with Engine(make_tiny_llama(), EngineConfig(max_num_batched_tokens=24, block_size=4, num_blocks=64)) as engine:
        for i in range(5):
            engine.add_request(" ".join(f"w{n}" for n in range(9 + 7 * i)), request_id=f"question {i}", max_tokens=9)
        for _ in range(3):
            engine.step()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = serve(engine, port=port, threaded=True)
        try:
            wait_until(lambda: reaches(port), "the server listens")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.stop()


def reaches(port: int) -> bool:
    """Whether a server listens."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(condition: Callable[[], Any], words: str) -> None:
    """Wait until a condition is true.

    Raises:
        TimeoutError: It is not.
    """
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not true after {PATIENCE:.0f} s: {words}")
        time.sleep(0.1)


def look(browser: Browser, states: tuple[State, ...], dark: bool) -> Iterator[tuple[str, list[str]]]:
    """Go through the states of a page that is open; yields the name of each and the faults of its picture."""
    wait_until(lambda: browser.run(FIND), "a view is drawn")
    browser.run(DARK, dark)
    for act, state in states:
        faults = []
        if act.startswith(":"):
            faults = [] if browser.run(CLICK, act[1:]) else [f"there is no button {act[1:]!r}"]
        elif act:
            browser.run(f"() => (({act})(), null)")
        time.sleep(0.6)
        yield state, faults + browser.run(FAULTS)


def main() -> int:
    """Open, go, look and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--browsers", nargs="+", choices=browsers.NAMES, default=["chromium"])
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=list(SIZES))
    parser.add_argument("--pages", nargs="+", help="only these of run, compare, incident, lab and live")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    chosen = [
        (name, states) for name, states in [*pages(options.folder), ("live", LIVE)] if name in (options.pages or [name])
    ]
    num_faults = 0
    for program in options.browsers:
        if why := browsers.missing(program):
            print(f"{program}: {why}")
            continue
        with contextlib.closing(browsers.launch(program)) as browser:
            for width, (name, states), dark in itertools.product(options.sizes, chosen, (False, True)):
                browser.resize(width, SIZES[width])
                with contextlib.ExitStack() as stack:
                    is_live = name == "live"
                    saved = (options.folder / f"{name}.html").resolve().as_uri()
                    browser.goto(stack.enter_context(live_page()) if is_live else saved)
                    for state, faults in look(browser, states, dark):
                        place = f"{program}-{width}-{'dark' if dark else 'light'}-{name}-{state.replace(' ', '-')}"
                        browser.picture(options.folder / f"{place}.png")
                        for fault in faults:
                            print(f"{place}: {fault}", flush=True)
                        num_faults += len(faults)
    print(f"{num_faults} faults")
    return int(num_faults > 0)


if __name__ == "__main__":
    sys.exit(main())
