"""Pages of other sites: the API is open to those that are named, and the dashboard and the trace to none."""

import json
import subprocess
import sys

import pytest
from serve_helpers import ENGINE, ServerProcess

from workbench.apps.serve.settings import ServeSettings

PAGE = "https://app.example.org"
KEY = "secret-key-1"
ALLOWED = "Access-Control-Allow-Origin"


@pytest.fixture(scope="module")
def server():
    server = ServerProcess(engine=ENGINE, serve={"allowed_origins": [PAGE], "api_key": KEY})
    yield server
    server.end()


def ask(server, method, path, origin=PAGE, body=None, **headers):
    return server.ask(method, path, body, {"Origin": origin, **headers})


def test_a_named_page_asks_first_and_then_calls_with_its_key(server):
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    status, headers, _ = ask(server, "OPTIONS", "/v1/completions", **asked)
    assert status == 204 and headers[ALLOWED] == PAGE and headers["Vary"] == "Origin"
    assert "POST" in headers["Access-Control-Allow-Methods"]
    assert "Authorization" in headers["Access-Control-Allow-Headers"]
    body = json.dumps({"prompt": [3, 4], "max_tokens": 1})
    status, headers, _ = ask(server, "POST", "/v1/completions", body=body, Authorization=f"Bearer {KEY}")
    assert status == 200 and headers[ALLOWED] == PAGE and "Access-Control-Allow-Credentials" not in headers
    status, headers, _ = ask(server, "POST", "/v1/completions", body=body)
    assert status == 401 and headers[ALLOWED] == PAGE  # the page may read why


def test_other_pages_and_other_addresses_stay_closed(server):
    key = {"Authorization": f"Bearer {KEY}"}
    for origin in ("https://evil.example", "http://app.example.org", PAGE + ".evil.example", PAGE + ":8", "null", ""):
        status, headers, _ = ask(server, "GET", "/v1/models", origin, **key)
        assert status == 403 and ALLOWED not in headers, origin
        question = {"Access-Control-Request-Method": "GET"}
        assert ask(server, "OPTIONS", "/v1/models", origin, **question)[0] == 403
    for path in ("/dashboard", "/dashboard/ws", "/trace/stream", "/metrics", "/static/x.js", "/"):
        status, headers, _ = ask(server, "GET", path, **key)
        assert status == 403 and ALLOWED not in headers, path


def test_a_connection_forgets_the_page_of_the_request_before(server):
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    allowed = []
    for headers in ({"Origin": PAGE}, {}, {"Origin": PAGE}, {"Host": "unknown.example"}):
        connection.request("GET", "/health", headers=headers)
        response = connection.getresponse()
        response.read()
        allowed.append(response.headers.get(ALLOWED))
    connection.close()
    assert allowed == [PAGE, None, PAGE, None]


@pytest.mark.parametrize(
    "origin", ["app.example.org", "https://app.example.org/", "HTTPS://A.example", "https://a b", ""]
)
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(ValueError, match="allowed_origins must hold origins"):
        ServeSettings(allowed_origins=(origin,))


def test_every_page_needs_a_key():
    with pytest.raises(ValueError, match="--api-key"):
        ServeSettings(allowed_origins=("*",))
    assert ServeSettings(allowed_origins=("*",), api_key=KEY).allowed_origins == ("*",)
    server = ServerProcess(engine=ENGINE, serve={"allowed_origins": ["*"], "insecure": True})
    try:
        assert ask(server, "GET", "/v1/models", "http://any.example:81")[1][ALLOWED] == "http://any.example:81"
        assert ask(server, "GET", "/dashboard", "http://any.example:81")[0] == 403
    finally:
        server.end()


def test_the_command_takes_vllms_list():
    def check(origins):
        command = [sys.executable, "-m", "workbench", "serve", "--check", "--allowed-origins", origins]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    run = check(f'["{PAGE}"]')
    assert run.returncode == 0 and f"other sites      {PAGE}" in run.stdout
    run = check(PAGE)
    assert run.returncode == 2 and "expected a JSON list" in run.stderr
