"""The explorer's server: this machine only, its own page only, and no request costs more than it may."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from command_line import run as command
from plans import CLEAN
from repository import ROOT

from threefold.explore import server as explorer_server
from threefold.explore.request import Started
from threefold.explore.server import MOST_BODY, MOST_CONNECTIONS, Background, ExplorerServer
from threefold.findings import FindingsError

LIMIT = 120.0


@pytest.fixture(scope="module")
def server() -> Iterator[ExplorerServer]:
    found = ExplorerServer(0, Started({}))
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.close()
    thread.join(LIMIT)


def ask(
    server: ExplorerServer, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """A request whose headers are exactly these, beside the length."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT)
    sent = {"Host": server.names[0], **{name.replace("_", "-"): value for name, value in headers.items()}}
    connection.putrequest(method, path, skip_host=True)
    for name, value in sent.items():
        connection.putheader(name, value)
    if body is not None and "Content-Length" not in sent:
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def question(server: ExplorerServer, value: Any, path: str = "/answer", **headers: str) -> tuple[int, Any]:
    content = {"Content_Type": "application/json", **headers}
    status, _, body = ask(server, "POST", path, json.dumps(value).encode(), **content)
    return status, json.loads(body)


def test_it_listens_on_the_loopback_interface_alone(server: ExplorerServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    # All of 127.0.0.0/8 is this machine on Linux; a socket for all interfaces would answer on this address too.
    with pytest.raises(OSError):  # noqa: PT011 (refused or unreachable, by system)
        socket.create_connection(("127.0.0.2", server.port), timeout=5)


def test_the_page_and_an_answer(server: ExplorerServer) -> None:
    status, headers, body = ask(server, "GET", "/")
    assert status == 200
    assert b"Explore a plan" in body
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cache-Control"] == "no-store"
    assert b"connect-src &#x27;self&#x27;" in body
    status, found = question(server, CLEAN, Origin=f"http://{server.names[0]}", Sec_Fetch_Site="same-origin")
    assert (status, found["ok"]) == (200, True)


@pytest.mark.parametrize("host", ["example.com", "127.0.0.1", "127.0.0.1:1", "evil.localhost", "", "0.0.0.0"])
def test_foreign_names_are_refused(server: ExplorerServer, host: str) -> None:
    """DNS rebinding: a page of the internet whose name leads to this machine."""
    assert ask(server, "GET", "/", Host=host)[0] == 403
    assert question(server, CLEAN, Host=host)[0] == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://example.com"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_foreign_origins_are_refused(server: ExplorerServer, headers: dict[str, str]) -> None:
    for path in ("/answer", "/layouts", "/fixes"):
        assert question(server, CLEAN, path, **headers)[0] == 403


def test_a_form_of_another_page_cannot_ask(server: ExplorerServer) -> None:
    """Forms send text or form data without asking the browser's leave first; JSON needs it."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert ask(server, "POST", "/answer", b"{}", Content_Type=kind)[0] == 415


def test_what_a_request_may_be(server: ExplorerServer) -> None:
    kind = {"Content_Type": "application/json"}
    assert ask(server, "POST", "/answer", b"{", **kind)[0] == 400
    assert ask(server, "POST", "/answer", b"[" * 10_000, **kind)[0] == 400
    assert ask(server, "POST", "/answer", b"{}", Content_Length="-1", **kind)[0] == 411
    assert ask(server, "POST", "/answer", b"", Content_Length=str(MOST_BODY + 1), **kind)[0] == 413
    assert ask(server, "POST", "/nothing", b"{}", **kind)[0] == 404
    assert ask(server, "GET", "/../../etc/passwd")[0] == 404
    assert ask(server, "DELETE", "/")[0] == 501
    assert question(server, None)[1]["ok"] is False


def test_silent_connections_hold_nobody_up(server: ExplorerServer) -> None:
    """More connections than there is room for are closed; after those that say nothing end, there is room again."""
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT) for _ in range(8)]
    try:
        assert question(server, CLEAN)[0] == 200
    finally:
        for one in silent:
            one.close()


BODY_MISSING = b"POST /answer HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"


@pytest.mark.parametrize("sent", [b"", b"GET / HT", BODY_MISSING])
def test_slow_connections_give_way_to_new_ones(
    server: ExplorerServer, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """However long a request may take: where there are too many, the slowest of them are ended."""
    monkeypatch.setattr(explorer_server, "CONNECTION_SECONDS", 10.0 * LIMIT)
    slow = []
    try:
        for _ in range(3 * MOST_CONNECTIONS):
            slow.append(socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT))
            slow[-1].sendall(sent.replace(b"\r\n", f"\r\nHost: {server.names[0]}\r\n".encode(), 1))
        assert question(server, CLEAN)[0] == 200
        assert ask(server, "GET", "/")[0] == 200
    finally:
        for one in slow:
            one.close()


@pytest.mark.parametrize(
    "ended", [b"GET / HTTP/1.1\r\nX: ", b"POST /answer HTTP/1.1\r\nHost: {host}\r\n{rest}\r\n\r\n"]
)
def test_a_request_that_trickles_in_is_ended(
    server: ExplorerServer, monkeypatch: pytest.MonkeyPatch, ended: bytes
) -> None:
    """A byte now and then, in the head or in the body, holds no connection for longer than a request may take."""
    monkeypatch.setattr(explorer_server, "CONNECTION_SECONDS", 0.5)
    rest = b"Content-Type: application/json\r\nContent-Length: 9000"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(ended.replace(b"{host}", server.names[0].encode()).replace(b"{rest}", rest))
        client.settimeout(0.1)
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            try:
                client.sendall(b" ")
                assert client.recv(100) == b""
                return
            except TimeoutError:
                continue
            except ConnectionError:
                return
    pytest.fail("the connection is still open")


def test_a_port_in_use_is_a_finding(server: ExplorerServer, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, out, _ = command("explore", "--no-browser", "--port", port, capsys=capsys)
    assert code == 1
    assert "error[port-free] --port" in out
    assert command("explore", "--port", "99999", capsys=capsys)[0] == 2


def test_a_bad_plan_is_a_finding(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command("explore", str(tmp_path / "none.toml"), "--no-browser", capsys=capsys)
    assert code == 1
    assert "error[" in out
    recipe = str(ROOT / "recipes" / "tiny-qwen3-moe-256-1xcpu-fp32.toml")
    for override in ("layout.epp=2", "layout.ep=many", "layout.ep=auto"):
        code, out, _ = command("explore", recipe, override, "--no-browser", capsys=capsys)
        assert (code, "error[" in out) == (1, True), override


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(sign: int) -> None:
    # A shell may start programs with SIGINT ignored, which Python then leaves so.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from threefold.cli.main import main; sys.exit(main(['explore', '--no-browser', '--port', '0']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("http://127.0.0.1:")
    process.send_signal(sign)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0
    assert err.strip() == "ended"


def sleepy(seconds: float) -> dict[str, Any]:
    time.sleep(seconds)
    return {"slept": seconds}


def until_over(work: Background, key: str, *arguments: Any) -> dict[str, Any]:
    until = time.monotonic() + LIMIT
    while (found := work.ask(key, *arguments))["state"] == "working":
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def test_background_work_is_done_once_and_replaced_by_newer_work() -> None:
    work = Background(sleepy)
    try:
        assert work.ask("long", 1000.0)["state"] == "working"
        old = work._running
        assert old is not None
        assert until_over(work, "short", 0.0) == {"state": "done", "slept": 0.0}
        assert not old[1].is_alive()
        assert work.ask("short", 0.0)["state"] == "done"
    finally:
        work.close()


def test_background_work_has_a_limit() -> None:
    work = Background(sleepy, limit_seconds=0.2)
    try:
        assert until_over(work, "long", 1000.0) == {"state": "failed", "why": "it took more than 0 s"}
    finally:
        work.close()


def test_the_server_does_not_start_twice_on_a_port() -> None:
    first = ExplorerServer(0, Started({}))
    try:
        with pytest.raises(FindingsError, match="port-free"):
            ExplorerServer(first.port, Started({}))
    finally:
        first.close()
