"""https, its cookie, and files that are not certificates."""

import http.client
import os
import shutil
import socket
import ssl
import subprocess
import sys

import pytest
from serve_helpers import ENGINE, make_chat_model, serving

from workbench.apps.serve.settings import ServeSettings

KEY = "secret-key-1"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate of this test, is not installed")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def test_https_is_served_and_its_cookie_is_secure(certificate):
    from workbench import Engine, EngineConfig

    cert, key = certificate
    context = ssl.create_default_context(cafile=cert)
    with (
        Engine(make_chat_model(), EngineConfig(**ENGINE)) as engine,
        serving(engine, tls_cert=cert, tls_key=key, api_key=KEY) as server,
    ):

        def ask(method, path, body=None):
            connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=60, context=context)
            connection.request(method, path, body, {"Authorization": f"Bearer {KEY}"})
            response = connection.getresponse()
            answer = response.status, response.headers, response.read()
            connection.close()
            return answer

        silent = socket.create_connection(("127.0.0.1", server.port))  # a handshake that never comes
        plain = socket.create_connection(("127.0.0.1", server.port))
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert ask("GET", "/health")[0] == 200
        body = '{"prompt": [5, 6], "max_tokens": 50, "stream": true, "ignore_eos": true}'
        assert ask("POST", "/v1/completions", body)[2].endswith(b"data: [DONE]\n\n")
        status, headers, _ = ask("GET", f"/dashboard?api_key={KEY}")
        assert status == 302 and headers["Set-Cookie"].endswith("; Secure")
        silent.close()
        plain.close()


def test_files_that_are_no_certificate_are_refused(certificate, tmp_path):
    cert, key = certificate
    (tmp_path / "x.pem").write_text("no certificate")
    for fields in (
        {"tls_cert": str(tmp_path / "none.pem")}, {"tls_cert": str(tmp_path / "x.pem")}, {"tls_cert": cert},
        {"tls_cert": cert, "tls_key": str(tmp_path / "x.pem")}, {"tls_key": key},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="--tls-cert"):
            ServeSettings(**fields).tls_context()
    assert ServeSettings().tls_context() is None
    assert ServeSettings(tls_cert=cert, tls_key=key).tls_context().minimum_version == ssl.TLSVersion.TLSv1_2


USE_TERMINAL = """
import sys
from workbench.apps.serve.settings import ServeSettings
terminal = open(sys.argv[1])  # it controls this process, which leads a session
try:
    ServeSettings(tls_cert=sys.argv[2], tls_key=sys.argv[3]).tls_context()
except ValueError as problem:
    print("refused:", problem)
"""


def test_a_passphrase_is_not_asked_for(certificate, tmp_path):
    cert, key = certificate
    locked = str(tmp_path / "locked.pem")
    subprocess.run(
        ["openssl", "rsa", "-aes256", "-passout", "pass:word", "-in", key, "-out", locked],
        check=True, capture_output=True,
    )  # fmt: skip
    ours, theirs = os.openpty()
    try:
        run = subprocess.run(
            [sys.executable, "-c", USE_TERMINAL, os.ttyname(theirs), cert, locked],
            capture_output=True, text=True, timeout=300, start_new_session=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    finally:
        os.close(ours)
        os.close(theirs)
    assert run.stdout.startswith("refused: --tls-cert"), run.stderr
