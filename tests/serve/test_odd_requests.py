"""Headers, addresses and bodies that no browser sends are errors of the client."""

import http.client
import logging

import pytest
from raw_clients import connect, server_of


def raw(server, data):
    """Status of a request as bytes."""
    connection = connect(server, data)
    status = int(connection.recv(65536).split(b" ", 2)[1])
    connection.close()
    return status


@pytest.mark.parametrize("key", [None, "secret-key-1"])
def test_odd_headers_and_addresses_are_never_a_failure_of_the_server(chat_model, key, caplog):
    odd_headers = [
        ("Origin", "http://["), ("Origin", "http://]"), ("Origin", "null"), ("Origin", "http://[::1"),
        ("Origin", "\xff"),
        ("Host", "["), ("Host", "[]"), ("Host", "a b"), ("Host", "\xff"), ("Host", ":"), ("Cookie", "=;=;\xff"),
        ("Cookie", "a(b=1"),
        ("Cookie", "workbench_api_key=\"\\777"), ("Authorization", "Bearer \xff"), ("Authorization", "Bearer"),
        ("Content-Type", "multipart/form-data; boundary="), ("Content-Type", "multipart/form-data; boundary=\""),
        ("Content-Type", "application/x-www-form-urlencoded; charset=nowhere"), ("Content-Encoding", "gzip"),
        ("If-None-Match", "\"\\"), ("If-Modified-Since", "never"), ("Range", "bytes=9-1"), ("Accept", "\xff"),
    ]  # fmt: skip
    odd_paths = [
        "/static/%00", "/static/js/%00.js", "/%00", "/dashboard/%00", "/static/" + "a" * 5000, "/static/%ff%fe",
        "/static/../../etc/passwd", "/static/%2e%2e/%2e%2e/etc/passwd", "/static//etc/passwd", "//", "/dashboard/ws",
        "/dashboard/ws%00", "/dashboard?bokeh-session-id=%00", "/dashboard?api_key=%00", "/dashboard?" + "a=1&" * 3000,
        "/v1/models/%0a", "/v1/models/" + "%20" * 3000, "/static/extensions/panel/%00", "/static/extensions/none/x.js",
        "/dashboard/autoload.js?bokeh-autoload-element=%00", "/dashboard/metadata", "*", "http://[/", "/?%",
    ]  # fmt: skip
    with server_of(chat_model, api_key=key) as server, caplog.at_level(logging.ERROR):
        for name, value in odd_headers:
            host = b"" if name == "Host" else b"Host: 127.0.0.1\r\n"
            line = f"{name}: {value}\r\n".encode("latin-1")
            for path in (b"/v1/models", b"/dashboard", b"/static/js/bokeh.min.js", b"/health"):
                status = raw(server, b"GET " + path + b" HTTP/1.1\r\n" + host + line + b"\r\n")
                assert status < 500, (name, value, path)
        for path in odd_paths:
            bearer = f"Authorization: Bearer {key}\r\n" if key else ""
            status = raw(server, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{bearer}\r\n".encode())
            assert (status < 500 and status != 200) or path.startswith(("/dashboard", "/?")), (path, status)
        assert server.ask("GET", "/health")[0] == 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text


def test_the_body_of_a_rejected_request_is_not_kept(chat_model, monkeypatch):
    kept = []
    monkeypatch.setattr("tornado.web._HandlerDelegate.data_received", lambda self, data: kept.append(len(data)))
    with server_of(chat_model, api_key="secret-key-1", max_body_bytes=1 << 24) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/v1/completions", b"x" * 1_000_000)
        response = connection.getresponse()
        assert response.status == 401 and "API key" in response.read().decode()
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
    assert not kept


def test_a_failure_of_the_server_tells_the_client_nothing(chat_model, monkeypatch, caplog):
    with server_of(chat_model) as server:

        def fail():
            raise RuntimeError("a secret of the server")

        monkeypatch.setattr(server.server.bridge.metrics, "render", fail)
        status, _, text = server.ask("GET", "/metrics")
    assert status == 500 and "secret" not in text and "a secret of the server" in caplog.text
