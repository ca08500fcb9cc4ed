"""Clients whose grammars take long to compile or to follow, beside honest clients of the same server.

    python tests/soak/grammars.py --seconds 60 --write

Starts two servers with SmolLM2: one is attacked, the other is the control. One honest client sends the same plain
requests to both in turn, and the ratio of their times is what the attack costs. Each attack runs alone. Prints one line
of JSON for each.
"""

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

from attacks import give_way, post  # noqa: E402 - beside this file
from hostile import end_part, quantiles_ms, start_part  # noqa: E402

RESULT = Path(__file__).parent / "results" / "grammars.json"
PLAIN = {"prompt": "The capital of France is", "max_tokens": 16, "ignore_eos": True}


def ambiguous(size, remark):
    """A Lark grammar whose rows take cubic time; the remark makes the text a new one."""
    rules = "\n".join(f'x{i}: e "a" | "a" e | "a" | e e' for i in range(size))
    return f"// {remark}\nstart: e\ne: {' | '.join(f'x{i}' for i in range(size))}\n{rules}"


def wide(remark):
    """A schema of 51 KB, which is honest."""
    return {"type": "object", "title": str(remark), "properties": {f"name{i}": {} for i in range(4000)}}


def hidden(remark):
    """A grammar that is cheap until a few tokens have come."""
    return ambiguous(150, remark).replace("start: e\n", f'start: "x{remark}" e\n')


def send(port, wanted, leave_after, **fields):
    """Ask for a structured answer, and leave."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(leave_after)
        connection.sendall(post("/v1/completions", {"prompt": "n", "structured_outputs": wanted, **fields}))
        connection.recv(100_000)


ATTACKS = {
    "a: automata of multipleOf": [
        lambda port, i: send(port, {"json": {"type": "integer", "multipleOf": 9_999_991, "title": str(i)}}, 2),
        lambda port, i: send(port, {"json": {"type": "integer", "multipleOf": 999_983, "title": str(i)}}, 2),
        lambda port, i: send(port, {"json": {"type": "boolean"}}, 30),
    ],
    "b: a cubic grammar whose sender leaves": [
        lambda port, i: send(port, {"grammar": ambiguous(450, i)}, 2),
        lambda port, i: send(port, {"regex": "a"}, 30),
    ],
    "c: large schemas": [
        *[lambda port, i: send(port, {"json": wide(i)}, 60) for _ in range(4)],
        *[lambda port, i: send(port, {"json": wide(-i)}, 60, n=16) for _ in range(2)],
    ],
    "d: slow masks": [
        *[lambda port, i: send(port, {"grammar": ambiguous(150, "same")}, 60) for _ in range(2)],
        *[lambda port, i: send(port, {"grammar": ambiguous(150, i)}, 60) for _ in range(2)],
        *[lambda port, i: send(port, {"grammar": hidden(i)}, 60) for _ in range(2)],
    ],
}


def start_server():
    """The process and its port."""
    command = [sys.executable, "-m", "workbench", "serve", "--port", "0", "--keep-steps", "1000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return process, int(re.search(r":(\d+) ", process.stdout.readline())[1])


def family(process):
    """The process and all that it has started: number, command and resident MiB, shared pages in equal parts."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    members, found = [process], []
    while members:
        member = members.pop()
        members += [child for child, parent in parents.items() if parent == member]
        with contextlib.suppress(OSError):
            memory = re.search(r"^Pss: *(\d+)", Path(f"/proc/{member}/smaps_rollup").read_text(), re.M)
            command = Path(f"/proc/{member}/cmdline").read_bytes().decode().replace("\0", " ")
            found.append((member, command, int(memory[1]) >> 10))
    return found


def ask(port, body):
    """Seconds that a completion takes."""
    start = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    answer = response.read()
    assert response.status == 200, answer
    connection.close()
    return time.perf_counter() - start


def besiege(name, attackers, servers, seconds):
    """Attack the first server, and report."""
    (attacked, port), (_, control) = servers
    over, counts = threading.Event(), [0] * len(attackers)

    def repeat(index):
        give_way()
        while not over.is_set():
            counts[index] += 1
            attackers[index](port, counts[index] * 100 + index)
            over.wait(0.01)

    before = family(attacked.pid)
    times = {"attacked": [], "control": [], "structured": [], "structured control": []}
    probes = [start_part("--probe", each) for each in (port, control)]
    threads = [threading.Thread(target=repeat, args=(index,)) for index in range(len(attackers))]
    for thread in threads:
        thread.start()
    honest = {**PLAIN, "ignore_eos": False, "structured_outputs": {"regex": "[a-z ]{10,16}"}}
    memory, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        times["attacked"].append(ask(port, PLAIN))
        times["control"].append(ask(control, PLAIN))
        times["structured"].append(ask(port, honest))
        times["structured control"].append(ask(control, honest))
        memory.append(sum(size for *_, size in family(attacked.pid)))
    over.set()
    for thread in threads:
        thread.join()
    health, control_health = map(end_part, probes)
    time.sleep(15)
    after = family(attacked.pid)
    known = {member for member, *_ in before}
    medians = {name: statistics.median(values) for name, values in times.items()}
    quarter = len(memory) // 4 or 1
    return {
        "attack": name,
        "attacks": sum(counts),
        "honest requests": len(times["attacked"]),
        "ratio": round(medians["attacked"] / medians["control"], 2),
        "ratio of structured": round(medians["structured"] / medians["structured control"], 2),
        "worst": {name: round(max(values), 2) for name, values in times.items()},
        "health": quantiles_ms(health),
        "health of the control": quantiles_ms(control_health),
        "MiB": {
            "before": sum(size for *_, size in before),
            "second quarter": round(statistics.mean(memory[quarter : 2 * quarter])),
            "last quarter": round(statistics.mean(memory[-quarter:])),
            "most": max(memory),
            "after": sum(size for *_, size in after),
        },
        "processes after": [command[-60:] for member, command, _ in after if member not in known],
        "CPU seconds of what is left": round(cpu_seconds(after), 2),
    }


def cpu_seconds(members):
    """Processor seconds that processes use within a second."""

    def used():
        total = 0
        for member, *_ in members:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        return total

    before = used()
    time.sleep(1)
    return (used() - before) / os.sysconf("SC_CLK_TCK")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", default="", help="the attack that begins with this letter")
    parser.add_argument("--write", action="store_true", help="keep the result in tests/soak/results")
    options = parser.parse_args()
    servers = [start_server(), start_server()]
    results = []
    try:
        for _, port in servers:
            for _ in range(3):
                ask(port, PLAIN)
                ask(port, {**PLAIN, "ignore_eos": False, "structured_outputs": {"regex": "[a-z]{4}"}})
        for name, attackers in ATTACKS.items():
            if name.startswith(options.only):
                load = os.getloadavg()[0]
                results.append({"load before": round(load, 1), **besiege(name, attackers, servers, options.seconds)})
                print(json.dumps(results[-1]), flush=True)
    finally:
        for process, _ in servers:
            process.send_signal(signal.SIGTERM)
        for process, _ in servers:
            process.wait(60)
    if options.write:
        RESULT.write_text(json.dumps({"processors": os.cpu_count(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
