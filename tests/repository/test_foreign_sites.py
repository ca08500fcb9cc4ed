"""Pages of other sites: every HTTP server of the package refuses a foreign Host and a foreign Origin."""

import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from distributed_jobs import free_ports

from workbench import simulate
from workbench.base.served_names import ServedNames

ROOT = Path(__file__).parents[2]
PROXY = "hub.example.org"
WORKLOAD = {"config": {}, "requests": [{"id": "a", "prompt": [3, 4, 5], "max_tokens": 2}]}
WEBSOCKET = {
    "Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}  # fmt: skip


@contextmanager
def dashboard(allow_hosts, _folder):
    """The page of ``workbench demo`` and ``workbench trace watch FILE``."""
    from workbench.viz.app import serve

    port = free_ports(1)
    server = serve(simulate(WORKLOAD), port=port, threaded=True, allow_hosts=allow_hosts)
    yield port
    server.stop()


@contextmanager
def fleet(allow_hosts, folder):
    """The page of ``workbench trace watch FOLDER``."""
    from workbench.trace.readings.fleet import Fleet
    from workbench.viz.app import serve_session
    from workbench.viz.fleet_page import make_fleet_app

    simulate(WORKLOAD).save(folder / "rank0.jsonl")
    port = free_ports(1)
    with Fleet(folder, whole=True) as ranks:
        server = serve_session(make_fleet_app(ranks), port=port, threaded=True, allow_hosts=allow_hosts)
        yield port
        server.stop()


@contextmanager
def playground(allow_hosts, folder):
    """The page of ``workbench playground``."""
    from workbench.apps.playground.server import make_server

    (folder / "index.html").write_text("the page")
    server = make_server(folder, 0, ServedNames("127.0.0.1", allow_hosts))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@contextmanager
def api(allow_hosts, _folder):
    """The server of ``workbench serve``."""
    from serve_helpers import ENGINE, make_chat_model, serving

    from workbench import Engine, EngineConfig

    with (
        Engine(make_chat_model(), EngineConfig(**ENGINE)) as engine,
        serving(engine, allowed_hosts=allow_hosts) as client,
    ):
        yield client.port


SERVERS = {
    "viz/app.py": (dashboard, "/", "/ws"),
    "viz/app.py, a folder": (fleet, "/", "/ws"),
    "apps/playground/server.py": (playground, "/", None),
    "apps/serve/listener.py": (api, "/v1/models", "/dashboard/ws"),
}
"""Each server by the file that makes it: how it is started, a path of it, and that of its websocket."""


def test_the_table_holds_every_server_of_the_package():
    makes = re.compile(r"pn\.serve\(|get_server\(|HTTPServer\(|\(HTTPServer\)|AppRunner\(|asyncio\.start_server\(")
    makers = {
        path.relative_to(ROOT / "workbench").as_posix()
        for path in (ROOT / "workbench").rglob("*.py")
        if makes.search(path.read_text())
    }
    assert makers == {name.partition(",")[0] for name in SERVERS}


@pytest.fixture(params=SERVERS)
def served(request, tmp_path):
    """A running server: its port, a path, and the path of its websocket."""
    start, path, socket = SERVERS[request.param]
    with start((PROXY,), tmp_path) as port:
        yield port, path, socket


def ask(port, path, host, **headers):
    """The status and the text of an answer; waits until the server listens."""
    for _ in range(200):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("GET", path, headers={"Host": host, **headers})
            answer = connection.getresponse()
            return answer.status, "" if answer.status == 101 else answer.read().decode()
        except ConnectionRefusedError:
            time.sleep(0.05)
        finally:
            connection.close()
    raise AssertionError("the server does not listen")


def test_names_of_other_sites_are_refused(served):
    port, path, socket = served
    own = f"127.0.0.1:{port}"
    assert ask(port, path, own)[0] == 200
    for host in (own, f"localhost:{port}", f"LOCALHOST:{port}", PROXY, f"{PROXY}:8443", f"[::1]:{port}"):
        assert ask(port, path, host)[0] == 200, host
    for host in (f"evil.example:{port}", "evil.example", f"localhost.evil.example:{port}", "", f"10.1.2.3:{port}"):
        status, text = ask(port, path, host)
        assert status == 403 and "--allow-host NAME" in text, host
    for origin in ("http://evil.example", f"http://evil.example:{port}", "null", "http://127.0.0.1:1", "http://["):
        status, text = ask(port, path, own, Origin=origin)
        assert status == 403 and "this Origin is not served" in text, origin
    # A page that has pointed its own name at this machine sends it as both.
    assert ask(port, path, f"evil.example:{port}", Origin=f"http://evil.example:{port}")[0] == 403
    assert ask(port, path, own, Origin=f"http://{own}")[0] == 200
    if socket:
        for host, origin in ((f"evil.example:{port}",) * 2, (own, "evil.example"), (f"evil.example:{port}", own)):
            assert ask(port, socket, host, Origin=f"http://{origin}", **WEBSOCKET)[0] == 403, (host, origin)
        # A proxy passes on its own name, in both headers or in one.
        for host, origin in ((own, own), (PROXY, PROXY), (own, PROXY)):
            status, _ = ask(port, socket, host, Origin=f"http://{origin}", **WEBSOCKET)
            assert status == 101, (host, origin)


def test_a_server_for_other_machines_is_called_by_any_address():
    names = ServedNames("0.0.0.0")
    assert (
        names.serves_host("192.168.1.7:8000") and names.serves_host("[fe80::1]:8000") and names.serves_host("localhost")
    )
    assert not names.serves_host("evil.example:8000")
    by_name = ServedNames("Server.example.org")
    assert by_name.serves_host("server.example.org:8000") and not by_name.serves_host("other.example.org:8000")
    for name in ("http://hub.example.org", "hub.example.org:8000", "*", "", "a b"):
        with pytest.raises(ValueError, match=r"--allow-host takes names such as hub\.example\.org"):
            ServedNames(allowed=(name,))


def test_every_command_that_serves_takes_names(capsys):
    from workbench.apps.cli import main

    for command in (["demo"], ["trace", "watch"], ["playground"], ["serve"]):
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        assert "--allow-host NAME" in capsys.readouterr().out
        arguments = [*command, *(["none.jsonl"] if "watch" in command else []), "--allow-host", "http://x/"]
        assert main(arguments) == 2
        assert "--allow-host takes names such as hub.example.org" in capsys.readouterr().err


def test_a_dashboard_behind_jupyter_server_proxy(tmp_path):
    """Its page and its websocket below /user/name/, with the name of the hub in the headers, as a browser gets them."""
    pytest.importorskip("jupyter_server_proxy")
    import asyncio

    from tornado.httpclient import HTTPRequest
    from tornado.websocket import websocket_connect

    port = free_ports(1)
    log = (tmp_path / "log").open("w+")
    with dashboard((PROXY,), tmp_path) as behind:
        jupyter = subprocess.Popen(
            [sys.executable, "-m", "jupyter", "server", "--allow-root", "--no-browser", f"--ServerApp.port={port}",
             "--ServerApp.base_url=/user/name/", "--IdentityProvider.token=", "--ServerApp.allow_remote_access=True",
             f"--ServerApp.allow_origin=https://{PROXY}", f"--ServerApp.root_dir={tmp_path}"],
            stdout=log, stderr=log, env={**os.environ, "HOME": str(tmp_path)},
        )  # fmt: skip
        try:
            for _ in range(600):
                log.seek(0)
                if f":{port}/user/name/" in log.read() or jupyter.poll() is not None:
                    break
                time.sleep(0.1)
            path = f"/user/name/proxy/{behind}/"
            status, page = ask(port, path, PROXY)
            assert status == 200, page
            (token,) = re.findall(r'"token":"([^"]+)"', page)
            # The page names all that it loads from the server relative to its own address.
            assert not re.search(r'(?:src|href)="/(?!/)', page)

            async def open_socket():
                request = HTTPRequest(
                    f"ws://127.0.0.1:{port}{path}ws", headers={"Host": PROXY, "Origin": f"https://{PROXY}"}
                )
                socket = await websocket_connect(request, subprotocols=["bokeh", token])
                first = json.loads(await socket.read_message())
                socket.close()
                return first["msgtype"]

            # On another thread: this one has an event loop once a test has driven a browser.
            with ThreadPoolExecutor(1) as thread:
                assert thread.submit(asyncio.run, asyncio.wait_for(open_socket(), 60)).result() == "ACK"
        finally:
            jupyter.terminate()
            jupyter.wait(30)
            log.close()
