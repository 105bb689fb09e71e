"""Serves the explorer on the loopback interface, to pages that came from it alone.

Every request has to name this server as its host: a page of the internet whose name was made to lead here is refused. A
question has to come as JSON and, where a browser says where from, from our own page. Bodies, connections and time are
limited, slow connections give way to new ones, one answer is computed at a time, and nothing is written or sent.
"""

import io
import json
import socket
import sys
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from threefold.explore.answer import Answers, question_of, request_key, search_layouts, try_fixes
from threefold.explore.background import Background
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
