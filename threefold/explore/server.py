"""Serves the explorer on the loopback interface, to pages that came from it alone.

Every request has to name this server as its host: a page of the internet whose name was made to lead here is refused. A
question has to come as JSON and, where a browser says where from, from our own page. Bodies, connections and time are
limited, work that takes seconds runs in a process of its own, slow connections give way to new ones, one answer is
computed at a time, and nothing is written or sent.
"""

import io
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from threefold.explore.answer import Answers, question_of, request_key, search_layouts, try_fixes
from threefold.explore.controls import explorer_page
from threefold.explore.request import Started, checked_fields
from threefold.findings import Finding, FindingsError

HOST = "127.0.0.1"
MOST_BODY = 16 * 1024  # bytes
MOST_CONNECTIONS = 32
CONNECTION_SECONDS = 10.0  # in which a request has to arrive
WAIT_SECONDS = 5.0  # for the answer before
JSON, HTML = "application/json", "text/html; charset=utf-8"


class ExplorerServer(ThreadingHTTPServer):
    """The server with what its handlers share."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, port: int, started: Started) -> None:
        """Raises a finding where the port is not to be had."""
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            problem = f"port {port} cannot be opened: {error.strerror or error}"
            finding = Finding(rule="port-free", at="--port", problem=problem, advice="give another one, or 0 for any")
            raise FindingsError([finding]) from None
        self.started, self.answers = started, Answers(started)
        self.searches, self.trials = Background(search_layouts), Background(try_fixes)
        self.page = explorer_page(started).encode()
        self.computing = threading.Lock()
        self._lock = threading.Lock()  # of the two below
        self._open: set[socket.socket] = set()
        self._arriving: dict[socket.socket, None] = {}  # those whose request is not here yet, the longest waiting first

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}/"

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may call this server."""
        return f"{HOST}:{self.port}", f"localhost:{self.port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """One thread a connection. Where there are too many, the one that is slowest with its request is ended."""
        with self._lock:
            if len(self._open) >= MOST_CONNECTIONS and self._arriving:
                slowest = next(iter(self._arriving))
                self._forget(slowest)
                with suppress(OSError):  # it may have ended by itself
                    slowest.shutdown(socket.SHUT_RDWR)
            has_room = len(self._open) < MOST_CONNECTIONS
            if has_room:
                self._open.add(request)
                self._arriving[request] = None
        if has_room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._forget(request)

    def note_arrival(self, request: socket.socket, has_arrived: bool) -> None:
        """A connection waits for its next request, or has sent all of it and is not ended for others any more."""
        with self._lock:
            self._arriving.pop(request, None)
            if request in self._open and not has_arrived:
                self._arriving[request] = None

    def _forget(self, request: socket.socket) -> None:
        self._open.discard(request)
        self._arriving.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away is nothing to report; other faults are shown by Python's own handler."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def close(self) -> None:
        self.searches.close()
        self.trials.close()
        self.server_close()


class _ArrivingRequest(io.RawIOBase):
    """What a client sends. All of a request has to arrive within `CONNECTION_SECONDS`: a limit for each read alone
    would let a client that sends a byte now and then hold its connection for ever."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.begin()

    def begin(self) -> None:
        self._until = time.monotonic() + CONNECTION_SECONDS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request did not arrive in time")
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(CONNECTION_SECONDS)  # for the answer


class Handler(BaseHTTPRequestHandler):
    """GET / is the page; POST /answer, /layouts and /fixes take the fields of a plan."""

    server: ExplorerServer
    server_version, sys_version = "threefold", ""
    protocol_version = "HTTP/1.1"
    timeout = CONNECTION_SECONDS

    def setup(self) -> None:
        super().setup()
        self._arriving = _ArrivingRequest(self.connection)
        self.rfile = io.BufferedReader(self._arriving)

    def handle_one_request(self) -> None:
        self._arriving.begin()
        self.server.note_arrival(self.connection, has_arrived=False)
        super().handle_one_request()

    def do_GET(self) -> None:
        self.server.note_arrival(self.connection, has_arrived=True)
        if self._is_ours() and self.path in ("/", "/index.html"):
            self._send(HTTPStatus.OK, HTML, self.server.page)
        elif self._is_ours():
            self._refuse(HTTPStatus.NOT_FOUND, "there is only /")
        else:
            self._refuse(HTTPStatus.FORBIDDEN, "this server answers to its own name only")

    def do_POST(self) -> None:
        if not (self._is_ours() and self._comes_from_us()):
            self._refuse(HTTPStatus.FORBIDDEN, "questions come from the explorer's own page")
            return
        if self.path not in ("/answer", "/layouts", "/fixes"):
            self._refuse(HTTPStatus.NOT_FOUND, "there are /answer, /layouts and /fixes")
            return
        if self.headers.get_content_type() != JSON:
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"questions are {JSON}")
            return
        fields = self._body()
        if fields is None:
            return
        if self.path != "/answer":
            self._send_json(self._background(fields))
        elif self.server.computing.acquire(timeout=WAIT_SECONDS):
            try:
                found = self.server.answers.answer(fields)
            finally:
                self.server.computing.release()
            self._send_json(found)
        else:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "busy with other questions")

    def _background(self, raw: Any) -> dict[str, Any]:
        """Layouts of the question, or fixes for the plan: the state of the work, or its result."""
        server = self.server
        try:
            fields = checked_fields(raw)
        except FindingsError as error:
            return {"state": "failed", "why": "; ".join(one.problem for one in error.findings)}
        is_search = self.path == "/layouts"
        asked = question_of(fields) if is_search else fields
        work = server.searches if is_search else server.trials
        return work.ask(request_key(asked), asked, server.started)

    def _is_ours(self) -> bool:
        """Whether the request names this server: a name of the internet that was made to lead here does not."""
        hosts = self.headers.get_all("Host") or []
        return len(hosts) == 1 and hosts[0] in self.server.names

    def _comes_from_us(self) -> bool:
        """Whether a browser says that our page asks. Programs that are no browsers say nothing."""
        origins = self.headers.get_all("Origin") or []
        ours = [f"http://{name}" for name in self.server.names]
        site = self.headers.get("Sec-Fetch-Site", "same-origin")
        return all(origin in ours for origin in origins) and site in ("same-origin", "none")

    def _body(self) -> Any:
        """The value of the body; None, and a refusal, where it is none or too large."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > 9 or self.headers.get("Transfer-Encoding"):
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "a question says how long it is")
            return None
        if int(length) > MOST_BODY:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a question has at most {MOST_BODY} bytes")
            return None
        content = self.rfile.read(int(length))
        self.server.note_arrival(self.connection, has_arrived=True)
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            self._refuse(HTTPStatus.BAD_REQUEST, "the question is no JSON")
            return None
        return {} if value is None else value

    def _send_json(self, value: dict[str, Any]) -> None:
        self._send(HTTPStatus.OK, JSON, json.dumps(value).encode())

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self.close_connection = True
        self._send(status, JSON, json.dumps({"error": why}).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name of the base class)
        """Nothing: the terminal stays as it is."""


LIMIT_SECONDS = 120.0
MOST_KEPT = 32
Result = dict[str, Any]


class Background:
    """Runs a function of a module, which has to be importable by name, and keeps its results."""

    def __init__(self, work: Callable[..., Result], limit_seconds: float = LIMIT_SECONDS) -> None:
        self._work, self._limit = work, limit_seconds
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Result] = OrderedDict()
        self._running: tuple[str, BaseProcess, Connection, float] | None = None

    def ask(self, key: str, *arguments: Any) -> Result:
        """The result with the state "done", or the state "working"; "failed" has the reason as `why`."""
        with self._lock:
            self._collect()
            if key in self._kept:
                return self._kept[key]
            if self._running is None or self._running[0] != key:
                self._stop()
                self._start(key, arguments)
            assert self._running is not None
            return {"state": "working", "seconds": round(time.monotonic() - self._running[3], 1)}

    def close(self) -> None:
        """End what runs."""
        with self._lock:
            self._stop()

    def _start(self, key: str, arguments: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads can hang
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work_into, args=(theirs, self._work, arguments), daemon=True)
        process.start()
        theirs.close()
        self._running = key, process, ours, time.monotonic()

    def _collect(self) -> None:
        """Keep the result of work that has ended or takes too long."""
        if self._running is None:
            return
        key, process, pipe, began = self._running
        if pipe.poll():
            try:
                found = {"state": "done", **pipe.recv()}
            except EOFError:
                found = {"state": "failed", "why": "it ended without a result"}
        elif time.monotonic() - began > self._limit:
            found = {"state": "failed", "why": f"it took more than {self._limit:.0f} s"}
        elif not process.is_alive():
            found = {"state": "failed", "why": "it ended without a result"}
        else:
            return
        self._stop()
        self._kept[key] = found
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)

    def _stop(self) -> None:
        if self._running is None:
            return
        _, process, pipe, _ = self._running
        self._running = None
        pipe.close()
        process.terminate()
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join(5)


def _work_into(pipe: Connection, work: Callable[..., Result], arguments: tuple[Any, ...]) -> None:
    """What the process does; answers of the page go first."""
    os.nice(5)
    try:
        pipe.send(work(*arguments))
    except KeyboardInterrupt:  # Ctrl-C reaches every process of the terminal; the server ends us
        pass
    finally:
        pipe.close()
