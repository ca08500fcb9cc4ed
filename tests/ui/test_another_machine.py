"""``workbench demo --host`` followed from another machine: a network namespace, with a cable between the two."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys

import browsers
import pytest

TEACHER, PHONE = "192.0.2.1", "192.0.2.2"
"""Addresses that documentation may use and no network has."""

PATIENCE = 240

FOLLOW = """
import sys
from playwright.sync_api import sync_playwright

address, chromium, *arguments = sys.argv[1:]
FIND = '''() => {
  const find = (at) => {
    for (const e of at.querySelectorAll("*")) {
      const found = e.matches(".wb-root") ? e : e.shadowRoot && find(e.shadowRoot);
      if (found) return found;
    }
    return null;
  };
  globalThis.view = find(document)?.workbench;
  return Boolean(view?.store?.numSteps > 2 && view.status.class?.role);
}'''
with sync_playwright() as driver:
    browser = driver.chromium.launch(executable_path=chromium, args=arguments)
    page = browser.new_page(viewport={"width": 390, "height": 844}, is_mobile=True)
    outside = []
    local = (address, "data:", "blob:")
    page.on("request", lambda request: request.url.startswith(local) or outside.append(request.url))
    page.goto(f"{address}/#follow", timeout=120_000)
    page.wait_for_function(FIND, timeout=120_000)
    print("follows", page.evaluate("view.status.class.role"), page.evaluate("view.store.numSteps > 2"))
    page.evaluate("view.send('pause', {})")
    page.wait_for_function("view.status.message", timeout=60_000)
    print("told", page.evaluate("view.status.message"))
    print("wide", page.evaluate("innerWidth"))
    print("outside", outside)
"""


def ip(*arguments):
    """Run ``ip``; the test is skipped with its message where namespaces are not allowed."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"no second network here: ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture
def two_machines():
    """Two namespaces with a cable between them: the beginnings of commands on the teacher's machine and the phone."""
    if shutil.which("ip") is None:
        pytest.skip("no second network here: the command ip is not installed")
    names = [f"workbench-{os.getpid()}-{name}" for name in ("teacher", "phone")]
    with contextlib.ExitStack() as made:
        for name in names:
            ip("netns", "add", name)
            made.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
        ends = [f"wb{os.getpid() % 10**7}{end}" for end in "ab"]
        ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for name, end, address in zip(names, ends, (TEACHER, PHONE), strict=True):
            ip("-n", name, "address", "add", f"{address}/30", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [["ip", "netns", "exec", name] for name in names]


def test_a_phone_follows_the_demo_and_cannot_control_it(two_machines, smollm2):
    if why := browsers.missing("chromium"):
        pytest.skip(why)
    laptop, phone = two_machines
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "workbench", "demo", "--no-browser", "--host", "0.0.0.0", "--port", str(port)]
    with subprocess.Popen([*laptop, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as demo:
        try:
            said = ""
            while "for the class" not in said and "#follow" not in said:
                line = demo.stdout.readline()
                assert line, f"the demo ended: {said}"
                said += line
            address = re.search(r"dashboard: (\S+)", said).group(1)
            assert address == f"http://{TEACHER}:{port}", "the address that the class can reach, not 0.0.0.0"
            browser = [address, shutil.which(browsers.CHROMIUM_PROGRAM), *browsers.CHROMIUM]
            done = subprocess.run(
                [*phone, sys.executable, "-c", FOLLOW, *browser],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
            assert done.returncode == 0, done.stderr[-2000:]
            follows, told, wide, outside = done.stdout.splitlines()
            assert follows == "follows follower True"
            assert told == "told only the teacher controls the engine: a page of the class reads"
            assert (wide, outside) == ("wide 390", "outside []")
        finally:
            demo.send_signal(signal.SIGINT)
            demo.stdout.read()
            demo.wait(timeout=60)
