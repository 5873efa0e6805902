# SPDX-License-Identifier: Apache-2.0
"""TLS, client certificates and passwords: asked for by curl, checked by OpenSSL and bcrypt."""

from __future__ import annotations

import base64
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from unittest import mock

import bcrypt
import pytest

from profinferd.exporters import httpd, webconfig
from profinferd.exporters.httpd import HttpServer, Request, Response
from profinferd.exporters.webconfig import WebConfig, WebConfigError, load_web_config

PASSWORD = "correct horse"
HASH = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()


def authority(folder: Path) -> None:
    """A certificate authority, a server's and a client's certificate, made by openssl."""
    for name in ("ca", "server", "client"):
        sign = [] if name == "ca" else ["-CA", str(folder / "ca.pem"), "-CAkey", str(folder / "ca.key")]
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
             "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(folder / f"{name}.key"),
             "-out", str(folder / f"{name}.pem"), *sign],
            check=True, capture_output=True,
        )  # fmt: skip


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    authority(folder)
    return folder


@contextmanager
def serving(web: WebConfig) -> Iterator[HttpServer]:
    """A server as the daemon has it."""

    def route(request: Request) -> Response:
        return web.refusal(request) or Response(HTTPStatus.OK, body=b"figures\n")

    server = HttpServer("127.0.0.1", 0, route, print, web.tls)
    with mock.patch.object(httpd, "DEADLINE_SECONDS", 60.0):  # a client may have to wait for a core
        server.start()
        try:
            yield server
        finally:
            server.close()


def curl(url: str, *options: str) -> tuple[int, str]:
    """(HTTP status, 0 where there was no answer; body)."""
    done = subprocess.run(
        ["curl", "-s", "-m", "120", "-w", "\n%{http_code}", *options, url],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    body, _, status = done.stdout.rpartition("\n")
    return int(status or 0), body


def configured(folder: Path, text: str) -> WebConfig:
    path = folder / "web.yml"
    path.write_text(text)
    return load_web_config(str(path))


def test_tls_and_client_certificates(certificates: Path) -> None:
    """Without a certificate of the authority there is no answer; paths are relative to the file."""
    web = configured(
        certificates,
        "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n"
        "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n",
    )
    with serving(web) as server:
        ca = ["--cacert", str(certificates / "ca.pem")]
        mine = ["--cert", str(certificates / "client.pem"), "--key", str(certificates / "client.key")]
        assert curl(server.url, *ca, *mine) == (200, "figures\n")
        assert curl(server.url, *ca)[0] == 0
        assert curl(server.url, *mine)[0] == 0, "the server's certificate is checked by the client"
        assert curl(server.url.replace("https", "http"))[0] == 0
        assert curl(server.url, *ca, *mine, "--tls-max", "1.1")[0] == 0


def test_half_open_handshakes_hold_nobody_up(certificates: Path) -> None:
    """400 connections that never speak TLS."""
    web = configured(certificates, "tls_server_config: {cert_file: server.pem, key_file: server.key}\n")
    with serving(web) as server:
        address = server.socket.getsockname()[:2]
        idle = [socket.create_connection(address) for _ in range(400)]
        for sock in idle[::2]:
            sock.send(b"\x16\x03\x01")
        assert curl(server.url, "--cacert", str(certificates / "ca.pem")) == (200, "figures\n")
        for sock in idle:
            sock.close()


def test_passwords(tmp_path: Path) -> None:
    """As Prometheus has them; a right one is hashed once, wrong ones a few times a second at most."""
    web = configured(tmp_path, f"basic_auth_users:\n  ann: {HASH}\n")
    with serving(web) as server:
        assert curl(server.url)[0] == 401
        assert curl(server.url, "-u", f"ann:{PASSWORD}") == (200, "figures\n")
        assert curl(server.url, "-u", f"bob:{PASSWORD}")[0] == 401
        assert curl(server.url, "-u", "ann:wrong")[0] == 401
        assert curl(server.url, "-H", "Authorization: Basic !!!")[0] == 401
        assert curl(server.url, "-H", f"Authorization: Bearer {HASH}")[0] == 401


def test_guessing_is_slow_and_hurts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand guesses cost few hashes, and whoever has been let in once stays in."""
    web = WebConfig(None, {"ann": HASH})
    hashed: list[str] = []
    real = webconfig._fits

    def fits(password: str, stored: str) -> bool:
        hashed.append(password)
        return real(password, stored)

    monkeypatch.setattr(webconfig, "_fits", fits)

    def ask(password: str) -> bool:
        coded = base64.b64encode(f"ann:{password}".encode()).decode()
        return web.refusal(Request("GET", "/", {"authorization": f"Basic {coded}"})) is None

    assert ask(PASSWORD)
    begun = time.monotonic()
    for number in range(2000):
        assert not ask(f"guess {number}")
        assert ask(PASSWORD)
    seconds = time.monotonic() - begun
    assert len(hashed) <= 2 + webconfig.CHECKS_PER_SECOND * (seconds + 1)
    assert threading.active_count() < 50


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tls_server_config: {cert_file: none.pem, key_file: none.key}\n", "cannot read"),
        ("tls_server_config: {cert_file: x}\n", "key_file"),
        ("tls_server_config: {cert_file: web.yml, key_file: web.yml}\n", "not usable"),
        ("basic_auth_users: {ann: secret}\n", "basic_auth_users"),
        ("basic_auth_user: {}\n", "basic_auth_user"),
        ("http_server_config: {http2: true}\n", "http_server_config"),
        ("[\n", "YAML"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, why: str) -> None:
    """One line that says what is wrong; nothing that is not enforced is accepted."""
    with pytest.raises(WebConfigError) as caught:
        configured(tmp_path, text)
    assert why in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(WebConfigError, match="cannot read"):
        load_web_config(str(tmp_path / "missing"))
