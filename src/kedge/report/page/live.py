"""The same page, served while its recording grows: on this machine alone, to anyone with the address.

# Note [Who may read a served page]
Any web page can make a browser send requests to 127.0.0.1, so being on this machine is not enough. Each address
begins with a token that is new for each server and in none of the pages' links. A request must also name this machine
as its host, which a request through a foreign name does not. Only the page, its news and the announcement of news are
served.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from typing import Any

from kedge.report.page.document import Document
from kedge.report.page.render import news_of, page_of
from kedge.store.follow import Follower
from kedge.store.recording import Recording

LOOPBACK = "127.0.0.1"
HOSTS = {"127.0.0.1", "localhost", "[::1]"}

#: The least seconds between two readings of the recording, and the pause as a multiple of the time to condense it.
PAUSE = 1.0
REST = 3.0

#: Seconds after which a comment is sent on a quiet connection, to find out whether it is still open.
SIGN_OF_LIFE = 15.0
#: Seconds after which a connection without a request is closed.
SILENCE = 30.0

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class News:
    """The newest state of a recording, and a way to wait for a newer one."""

    def __init__(self, follower: Follower, condense: Callable[[Recording], Document], first: Recording) -> None:
        self._follower = follower
        self._condense = condense
        self._changed = threading.Condition()
        self._document = condense(first)
        self._number = 0
        self._closed = False

    @property
    def document(self) -> Document:
        """The newest state."""
        with self._changed:
            return self._document

    def refresh(self) -> float:
        """Read the recording if it has grown; return the seconds to wait before the next call."""
        begun = monotonic()
        recording = self._follower.poll()
        if recording is not None:
            document = self._condense(recording)
            with self._changed:
                self._document, self._number = document, self._number + 1
                self._changed.notify_all()
        return max(PAUSE, REST * (monotonic() - begun))

    def newer(self, number: int, timeout: float) -> int | None:
        """Wait for a state after this one; return the newest number, or None after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._number > number, timeout)
            return None if self._closed else self._number

    def close(self) -> None:
        """End all waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class PageServer(ThreadingHTTPServer):
    """The server of one recording's page; `close` ends all its threads and connections."""

    daemon_threads = False

    def __init__(self, news: News, port: int = 0) -> None:
        self.news = news
        self.token = secrets.token_urlsafe(24)
        self._connections: set[socket.socket] = set()
        super().__init__((LOOPBACK, port), _Handler)

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{LOOPBACK}:{self.server_port}/{self.token}/"

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection, and remember it."""
        connection, address = super().get_request()
        self._connections.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self._connections.discard(request)
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
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it has ended already
        self.server_close()


@contextmanager
def running(server: PageServer) -> Iterator[None]:
    """Answer requests in another thread for the length of a block."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="kedge serve")
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
        if not self._has_own_host():
            self._refuse(HTTPStatus.FORBIDDEN, "This address is not for this machine's name.")
            return
        token, _, rest = self.path.partition("?")[0].removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "The address is not complete: copy it from where kedge serve prints it.")
        elif rest == "":
            self._page()
        elif rest == "news":
            self._answer("application/json", news_of(self.server.news.document))
        elif rest == "events":
            self._events()
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "There is nothing here.")

    def _has_own_host(self) -> bool:
        host = self.headers.get("Host", "").lower()
        name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
        return (name if port.isdecimal() else host) in HOSTS

    def _page(self) -> None:
        if not self.path.partition("?")[0].endswith("/"):  # the page's requests are relative to its address
            self.send_response(HTTPStatus.PERMANENT_REDIRECT)
            self.send_header("Location", f"/{self.server.token}/")
            self.end_headers()
            return
        self._answer("text/html; charset=utf-8", page_of(self.server.news.document, live=True))

    def _events(self) -> None:
        """Announce each new state; the first announcement covers those since the page was made."""
        news = self.server.news
        self._begin(HTTPStatus.OK, "text/event-stream")
        announced, number = 0, 0
        while True:
            self.wfile.write(b"event: grown\ndata: \n\n" if number > announced else b": here\n\n")
            announced = number
            newest = news.newer(announced, SIGN_OF_LIFE)
            if newest is None:
                return
            number = newest

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._answer("text/plain; charset=utf-8", f"{why}\n", status)

    def _answer(self, kind: str, text: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        content = text.encode()
        self._begin(status, kind, len(content))
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

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that http.server gives it
        """Print nothing: the terminal belongs to the user who started the server."""
