"""The same page, served while its recording grows.

It is served on this machine alone, to anyone with the address.

# Note [Who may read a served page]
Any web page can make a browser send requests to 127.0.0.1, so being on this machine is not enough.
Each address begins with a token that is new for each server and in none of the pages' links. A
request must also name this machine as its host, which a request through a foreign name does not.
Only the page, its news, the announcement of news and the metrics are served. The metrics are also
at ``/metrics``, for a request with the token in its header ``Authorization``, which no web page of
another server can make a browser send.

# Note [Many and slow clients]
Each connection has a thread, and there are at most `MOST_CONNECTIONS`; one more is told to come
again. A request must be complete `SILENCE` seconds after its connection, even if bytes trickle in,
and an answer must be taken in the same time. The page is rendered once for all that ask for it.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from typing import Any

from kedge.report.page.document import Document
from kedge.report.page.metrics import CONTENT_TYPE, metrics_of
from kedge.report.page.render import news_of, page_of
from kedge.report.what_ran import is_written
from kedge.store.follow import Follower
from kedge.store.recording import Recording

LOOPBACK = "127.0.0.1"
HOSTS = {"127.0.0.1", "localhost", "[::1]"}

#: The least seconds between two readings of the recording, and the pause as a multiple of the time
#: to condense it.
PAUSE = 1.0
REST = 3.0

#: Seconds without growth after which it is checked whether a process still writes the recording.
QUIET = 5.0

#: Seconds after which a comment is sent on a quiet connection, to find out whether it is still
#: open.
SIGN_OF_LIFE = 15.0
#: Seconds in which a connection must bring its whole request, and take an answer.
SILENCE = 30.0
#: The most connections at a time.
MOST_CONNECTIONS = 256
#: The most connections that may wait to be accepted.
MOST_WAITING = 512
#: The answer to one connection more.
BUSY = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class News:
    """The newest state of a recording, and a way to wait for a newer one."""

    def __init__(
        self,
        follower: Follower,
        condense: Callable[[Recording], Document],
        first: Recording,
    ) -> None:
        self._follower = follower
        self._condense = condense
        self._changed = threading.Condition()
        self._latest = first
        self._document = condense(first)
        self._grew = monotonic()
        self._rendering = threading.Lock()
        self._rendered: dict[Callable[[Document], str], tuple[Document, bytes]] = {}
        self._number = 0
        self._closed = False

    @property
    def document(self) -> Document:
        """The newest state."""
        with self._changed:
            return self._document

    def rendered(self, render: Callable[[Document], str]) -> bytes:
        """Return the newest state as a page or otherwise, rendered once however many ask for it."""
        with self._rendering:
            document = self.document
            known, content = self._rendered.get(render, (None, b""))
            if known is not document:
                content = render(document).encode()
                self._rendered[render] = (document, content)
            return content

    def refresh(self) -> float:
        """Read the recording if it has grown; return the seconds to wait before the next call."""
        begun = monotonic()
        recording = self._follower.poll()
        if recording is not None:
            self._latest = recording
            self._grew = begun
        elif self._is_over(begun):
            recording = self._latest
        if recording is not None:
            document = self._condense(recording)
            with self._changed:
                self._document = document
                self._number += 1
                self._changed.notify_all()
        return max(PAUSE, REST * (monotonic() - begun))

    def _is_over(self, now: float) -> bool:
        """Whether the page says that a process writes the recording, and none does any more."""
        said = self._document.described["run"].get("written")
        return bool(said) and now - self._grew > QUIET and is_written(self._latest) is False

    def newer(self, number: int, timeout: float) -> int | None:
        """Wait for a state after this one; return the newest number, or None after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._number > number, timeout)
            if self._closed:
                return None
            return self._number

    def close(self) -> None:
        """End all waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class PageServer(ThreadingHTTPServer):
    """The server of one recording's page; `close` ends all its threads and connections."""

    daemon_threads = False
    request_queue_size = MOST_WAITING

    def __init__(self, news: News, port: int = 0) -> None:
        self.news = news
        self.token = secrets.token_urlsafe(24)
        #: The open connections, each with the time by which its request must be complete; None once
        #: it is.
        self._connections: dict[socket.socket, float | None] = {}
        super().__init__((LOOPBACK, port), _Handler)

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{LOOPBACK}:{self.server_port}/{self.token}/"

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection, and remember it."""
        connection, address = super().get_request()
        self._connections[connection] = monotonic() + SILENCE
        return connection, address

    def verify_request(
        self,
        request: Any,
        client_address: Any,  # noqa: ARG002 - http.server's signature
    ) -> bool:
        """Whether there is room for one more connection; see Note [Many and slow clients]."""
        if len(self._connections) <= MOST_CONNECTIONS:
            return True
        with suppress(OSError):
            request.setblocking(False)
            request.send(BUSY)
        return False

    def request_complete(self, connection: socket.socket) -> None:
        """Stop the clock of a connection whose request has arrived."""
        if connection in self._connections:
            self._connections[connection] = None

    def service_actions(self) -> None:
        """End the connections whose request has not arrived in time; the server calls it often."""
        now = monotonic()
        for connection, until in self._connections.copy().items():
            if until is not None and now > until:
                _end(connection)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that disconnect during an answer; report other errors."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def close(self) -> None:
        """End every answer and every thread."""
        self.news.close()
        for connection in tuple(self._connections):
            # Browsers open connections ahead of time without a request; their threads wait for one.
            _end(connection)
        self.server_close()


def _end(connection: socket.socket) -> None:
    """Wake the thread of a connection, which closes it."""
    with suppress(OSError):  # it may have ended already
        connection.shutdown(socket.SHUT_RDWR)


def _live_page(document: Document) -> str:
    return page_of(document, live=True)


@contextmanager
def running(server: PageServer) -> Iterator[None]:
    """Answer requests in another thread for the length of a block."""
    interval = {"poll_interval": 0.1}
    thread = threading.Thread(target=server.serve_forever, kwargs=interval, name="kedge serve")
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.close()


class _Handler(BaseHTTPRequestHandler):
    """The answer to one request; see Note [Who may read a served page]."""

    server: PageServer
    timeout = SILENCE

    def do_GET(self) -> None:
        """Send the page, its news, or the announcement of news."""
        self.server.request_complete(self.connection)
        if not self._has_own_host():
            self._refuse(HTTPStatus.FORBIDDEN, "This address is not for this machine's name.")
            return
        path = self.path.partition("?")[0]
        token, _, rest = path.removeprefix("/").partition("/")
        if path == "/metrics":
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            rest = "metrics"
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(
                HTTPStatus.FORBIDDEN,
                "The address is not complete: copy it from where kedge serve prints it.",
            )
        elif rest == "" and path.endswith("/"):
            self._answer("text/html; charset=utf-8", self.server.news.rendered(_live_page))
        elif rest == "":  # the page's requests are relative to its address
            self.send_response(HTTPStatus.PERMANENT_REDIRECT)
            self.send_header("Location", f"/{self.server.token}/")
            self.end_headers()
        elif rest == "news":
            self._answer("application/json", self.server.news.rendered(news_of))
        elif rest == "metrics":
            self._answer(CONTENT_TYPE, self.server.news.rendered(metrics_of))
        elif rest == "events":
            self._events()
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "There is nothing here.")

    def do_HEAD(self) -> None:
        """Send what `do_GET` sends, without the content."""
        self.do_GET()

    def send_error(self, code: int, *_: object) -> None:
        """Refuse what is not a request for a page, in a few words and without repeating it."""
        self.close_connection = True
        self.request_version = self.protocol_version
        status = HTTPStatus(code)
        self._refuse(status, f"{status.phrase}.")

    def _has_own_host(self) -> bool:
        named = self.headers.get_all("Host") or []
        if len(named) != 1:
            return False
        host = named[0].lower()
        name, _, port = host.rpartition(":")
        # The address of [::1] has colons of its own, and a last part that is no number.
        if port.isdecimal():
            host = name
        return host in HOSTS

    def _events(self) -> None:
        """Announce each new state; the first announcement covers those since the page was made."""
        news = self.server.news
        self._begin(HTTPStatus.OK, "text/event-stream")
        if self.command == "HEAD":
            return
        announced = 0
        number: int | None = 0
        while number is not None:
            if number > announced:
                self.wfile.write(b"event: grown\ndata: \n\n")
            else:
                self.wfile.write(b": here\n\n")
            announced = number
            number = news.newer(announced, SIGN_OF_LIFE)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._answer("text/plain; charset=utf-8", f"{why}\n".encode(), status)

    def _answer(
        self,
        kind: str,
        content: bytes,
        status: HTTPStatus = HTTPStatus.OK,
    ) -> None:
        self._begin(status, kind, len(content))
        if self.command != "HEAD":
            self.wfile.write(content)

    def _begin(self, status: HTTPStatus, kind: str, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()

    def version_string(self) -> str:
        """Return the name of the program, without versions."""
        return "kedge"

    def log_message(
        self,
        format: str,  # noqa: A002 - the name that http.server gives it
        *args: Any,
    ) -> None:
        """Print nothing: the terminal belongs to the user who started the server."""
