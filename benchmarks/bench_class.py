"""A class around one dashboard: 30 clients that speak its protocol, three of them browsers, 20 of them followers.

    python benchmarks/bench_class.py [--rounds 3] [--steps 400] [--save]

The engine runs the bundled model in one process, the clients are another. In turns the engine takes the same steps
without clients and with the class; a step costs the processor time of the engine's thread. A follower's delay is the
time from the teacher's message, as the client process sends it, to the one that the follower receives. Steps are lost
if a client's packets leave one out, moves if the last one does not reach a follower, and cursors are independent if no
client is told a place that another visitor goes to.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import statistics
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _common import chromium, free_port, save

CLIENTS, BROWSERS, FOLLOWERS = 30, 3, 20
BROWSER_FOLLOWERS = 2
REQUESTS, PROMPT = 8, 64
MOVE_SECONDS = 0.5
FEW = 50
"""Number of steps between which the teacher moves."""

LEAD = re.compile(r'"request","move(\d+)"')
FOLLOWING = re.compile(r'"followers",(\d+)')
PLACE = re.compile(r"\b7700(\d\d)\b")
"""The step that a visitor goes to, with its number: nobody else should hear of it."""


# -- the engine's process --------------------------------------------------------------------------------------------


def engine_process(steps: int, *, with_class: bool) -> dict[str, Any]:
    """Take steps, with a class or without, and measure the engine's thread and the process."""
    from workbench import Engine, EngineConfig, SamplingParams
    from workbench.viz import app
    from workbench.viz.classroom import Classroom

    config = EngineConfig(num_blocks=REQUESTS * (PROMPT + steps) // 16 + 64, enable_prefix_caching=False)
    seconds: list[float] = []
    clients = None
    result: dict[str, Any] = {}
    with Engine("smollm2", config) as engine:
        engine.on_step(lambda _: seconds.append(time.thread_time()))
        for number in range(REQUESTS):
            ids = [5 + (number * 37 + i * 11) % 900 for i in range(PROMPT)]
            engine.add_request(ids, SamplingParams(max_tokens=steps, ignore_eos=True), request_id=f"r{number}")
        for _ in range(10):
            engine.step()
        if with_class:
            room, port = Classroom(), free_port()
            server = app.serve(engine, port=port, threaded=True, room=room)
            command = [sys.executable, __file__, "--clients", str(port), room.key]
            clients = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert clients.stdout is not None and clients.stdout.readline() == "ready\n", (
                "the class has not come together"
            )
        stopped = threading.Event()
        memory: list[float] = []
        watch = threading.Thread(target=watch_memory, args=(memory, stopped), daemon=True)
        watch.start()
        seconds.clear()
        begin = time.perf_counter()
        engine.run(progress=False)
        result["wall_seconds"] = round(time.perf_counter() - begin, 1)
        stopped.set()
        if clients is not None:
            answer, _ = clients.communicate(f"{len(engine.trace)}\n", timeout=240)
            result |= json.loads(answer)
            server.stop()
        parts = max(1, len(memory) // 4)
        result["memory_mib"] = {
            name: round(statistics.median(values), 1)
            for name, values in (("second_quarter", memory[parts : 2 * parts + 1]), ("last_quarter", memory[-parts:]))
            if values
        }
    result["cpu_seconds_of_steps"] = [after - before for before, after in itertools.pairwise(seconds)]
    return result


def watch_memory(sizes: list[float], stopped: threading.Event) -> None:
    """Note the resident memory of this process once a second, in MiB."""
    statm = Path("/proc/self/statm")
    while statm.exists() and not stopped.wait(1):
        pages = int(statm.read_text().split()[1])
        sizes.append(pages * 4096 / 2**20)


# -- the clients' process --------------------------------------------------------------------------------------------


@dataclass
class Client:
    """A page without a browser: what it has been told of the teacher's places, of steps, and of others' cursors."""

    socket: Any
    number: int
    view: str = ""
    leads: dict[int, float] = field(default_factory=dict)
    num_messages: int = 0
    num_steps: int = 0
    num_gaps: int = 0
    others_places: int = 0
    num_followers: int = 0  # as a teacher is told

    async def send(self, kind: str, content: dict[str, Any]) -> None:
        """Send a message."""
        for part in (json.dumps({"msgid": "1", "msgtype": kind}), "{}", json.dumps(content)):
            await self.socket.write_message(part)

    async def change(self, attr: str, new: Any) -> None:
        """Set a property of the view."""
        event = {"kind": "ModelChanged", "model": {"id": self.view}, "attr": attr, "new": new}
        await self.send("PATCH-DOC", {"events": [event]})

    async def command(self, number: int, **args: Any) -> None:
        """Send a command about the class."""
        values = {"type": "map", "entries": list(args.items())}
        entries = [("id", number), ("name", "class"), ("args", values)]
        await self.change("command", {"type": "map", "entries": entries})

    async def listen(self) -> None:
        """Take messages until the socket closes."""
        while (message := await self.socket.read_message()) is not None:
            now = time.perf_counter()
            self.num_messages += 1
            if isinstance(message, bytes):
                if message:
                    self.take_packet(message)
                continue
            if found := FOLLOWING.search(message):
                self.num_followers = int(found[1])
            if found := LEAD.search(message):
                self.leads.setdefault(int(found[1]), now)
            self.others_places += any(int(number) != self.number for number in PLACE.findall(message))

    def take_packet(self, packet: bytes) -> None:
        """Note the steps of a packet: each begins where the one before has ended, or earlier."""
        (length,) = struct.unpack_from("<I", packet)
        header = json.loads(packet[4 : 4 + length])
        self.num_gaps += header["first_step"] > self.num_steps
        self.num_steps = max(self.num_steps, header["first_step"] + header["num_steps"])


async def connect(port: int, number: int) -> Client:
    """Open a page and its session."""
    from tornado.websocket import websocket_connect

    address = f"http://127.0.0.1:{port}/"
    html = await asyncio.to_thread(lambda: urllib.request.urlopen(address, timeout=120).read().decode())
    token = re.search(r'"token":\s*"([^"]+)"', html)
    assert token is not None, "the page has no token"
    client = Client(await websocket_connect(f"ws://127.0.0.1:{port}/ws", subprotocols=["bokeh", token[1]]), number)
    while '"ACK"' not in str(await client.socket.read_message()):
        pass
    await client.send("PULL-DOC-REQ", {})
    while not client.view:
        message = await client.socket.read_message()
        assert message is not None, "the server has closed the socket"
        if isinstance(message, str) and '"roots"' in message:
            client.view = view_of(json.loads(message))
    ready = {"type": "event", "name": "document_ready", "values": {"type": "map", "entries": []}}
    event = {"kind": "MessageSent", "msg_type": "bokeh_event", "msg_data": ready}
    await client.send("PATCH-DOC", {"events": [event]})
    return client


def view_of(document: Any) -> str:
    """The id of the model that has the property ``status``, which is never empty."""
    if isinstance(document, dict):
        if "status" in (document.get("attributes") or ()) and "id" in document:
            return str(document["id"])
        document = list(document.values())
    found = (view_of(part) for part in document if isinstance(part, dict | list)) if isinstance(document, list) else ()
    return next(filter(None, found), "")


async def clients_process(port: int, key: str) -> dict[str, Any]:
    """Come together, let the teacher move until the engine's process says how many steps there were, and measure."""
    from playwright.async_api import async_playwright

    async with async_playwright() as driver:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = await driver.chromium.launch(executable_path=chromium(), args=arguments)
        pages = []
        for number in range(BROWSERS):
            page = await browser.new_page(viewport={"width": 1280, "height": 800})
            await page.goto(f"http://127.0.0.1:{port}/#{'follow' if number < BROWSER_FOLLOWERS else 'story'}")
            await page.wait_for_selector(".wb-root", timeout=120_000)
            pages.append(page)
        clients = [await connect(port, number) for number in range(CLIENTS - BROWSERS)]
        listening = [asyncio.create_task(client.listen()) for client in clients]
        for client in clients:
            await client.change("mounted", True)
        teacher, followers = clients[0], clients[1 : 1 + FOLLOWERS - BROWSER_FOLLOWERS]
        others = clients[1 + len(followers) :]
        await teacher.command(1, what="join", role="teacher", key=key)
        for client in followers:
            await client.command(1, what="join", role="follower")
        for _ in range(600):
            if teacher.num_followers == FOLLOWERS:
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(2)
        print("ready", flush=True)
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        sent: list[float] = []
        while not ended.done():
            for client in others:
                place = [("step", 770_000 + client.number), ("follow", False), ("request", None)]
                await client.change("cursor", {"type": "map", "entries": place})
            move = len(sent)
            sent.append(time.perf_counter())
            where = {"view": "story", "step": move % FEW, "follow": False, "request": f"move{move}"}
            await teacher.command(move + 2, what="lead", **where)
            await asyncio.wait([ended], timeout=MOVE_SECONDS)
        num_steps, last = int(await ended), len(sent) - 1
        step = "(root) => [root.workbench.cursor.step, root.workbench.store.numSteps]"
        places: list[list[int]] = []
        for _ in range(100):
            places = [await page.locator(".wb-root").first.evaluate(step) for page in pages]
            heard = all(last in client.leads for client in followers) and all(c.num_steps == num_steps for c in clients)
            if heard and all(place == [last % FEW, num_steps] for place in places[:BROWSER_FOLLOWERS]):
                break
            await asyncio.sleep(0.1)
        await browser.close()
        for task in listening:
            task.cancel()
        for client in clients:
            client.socket.close()
    told = [
        [client.leads[move] - begin for client in followers if move in client.leads] for move, begin in enumerate(sent)
    ]
    delays = [delay for of_move in told for delay in of_move]
    cuts = statistics.quantiles(delays, n=20)
    return {
        "moves": len(sent),
        "followers_ms": {
            "median": round(1e3 * statistics.median(delays), 1),
            "p95": round(1e3 * cuts[-1], 1),
            "max": round(1e3 * max(delays), 1),
        },
        "moves_that_a_later_one_replaced": len(sent) * len(followers) - len(delays),
        "followers_without_the_last_move": sum(last not in client.leads for client in followers),
        "browsers_that_follow_elsewhere": sum(place[0] != last % FEW for place in places[:BROWSER_FOLLOWERS]),
        "other_visitors_moved": sum(bool(client.leads) for client in others),
        "places_of_others_heard": sum(client.others_places for client in clients),
        "clients_without_all_steps": sum(client.num_gaps > 0 or client.num_steps != num_steps for client in clients)
        + sum(place[1] != num_steps for place in places),
        "messages": sum(client.num_messages for client in clients),
    }


# -- both ------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure in turns and print; ``--engine`` and ``--clients`` are the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400, help="decode steps of a run")
    parser.add_argument("--engine", choices=("alone", "class"), help=argparse.SUPPRESS)
    parser.add_argument("--clients", nargs=2, metavar=("PORT", "KEY"), help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/class.json")
    options = parser.parse_args()
    if options.clients:
        print(json.dumps(asyncio.run(clients_process(int(options.clients[0]), options.clients[1]))))
        return
    if options.engine:
        print(json.dumps(engine_process(options.steps, with_class=options.engine == "class")))
        return
    chromium()  # the script ends here if there is none
    rounds = []
    for _ in range(options.rounds):
        arms: dict[str, Any] = {}
        for arm in ("alone", "class"):
            command = [sys.executable, __file__, "--engine", arm, "--steps", str(options.steps)]
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            arms[arm] = json.loads(output.splitlines()[-1])
        alone, taught = (arms[arm].pop("cpu_seconds_of_steps") for arm in ("alone", "class"))
        pairs = list(zip(alone, taught, strict=True))
        arms["engine_cpu_ms_per_step"] = {
            "alone": round(1e3 * statistics.median(alone), 3),
            "class": round(1e3 * statistics.median(taught), 3),
        }
        arms["engine_cpu_change"] = round(statistics.median(after / before for before, after in pairs) - 1, 4)
        rounds.append(arms)
        print(json.dumps(arms), flush=True)
    changes = [arms["engine_cpu_change"] for arms in rounds]
    results = {
        "clients": CLIENTS,
        "browsers": BROWSERS,
        "followers": FOLLOWERS,
        "rounds": rounds,
        "engine_cpu_change": statistics.median(changes),
        "followers_p95_ms": max(arms["class"]["followers_ms"]["p95"] for arms in rounds),
    }
    if options.save:
        save("class", results)


if __name__ == "__main__":
    main()
