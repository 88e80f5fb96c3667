"""``kedge serve`` and clients that are many, slow, gone, or no browsers."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from kedge.report.page import live
from kedge.report.page.document import condense
from kedge.report.page.live import News, PageServer, running
from kedge.report.shown_run import ShownRun
from kedge.store.follow import Follower
from tests.report.page.runs import Run

pytestmark = pytest.mark.timing

HOST = "Host: localhost\r\n\r\n"


@pytest.fixture
def server(run: Callable[..., Run], tmp_path: Path) -> Iterator[PageServer]:
    """The server of the page of a run of one step."""
    recorded = run()
    recorded.step(0)
    follower = Follower(tmp_path / "net.kedge")
    first = follower.poll()
    assert first is not None
    made = PageServer(
        News(follower, lambda recording: condense(ShownRun(recording, (), ())), first)
    )
    with running(made):
        yield made
    recorded.writer.close()


def _connected(server: PageServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=60)


def _ask(server: PageServer, request: str) -> bytes:
    with _connected(server) as line, line.makefile("rb") as file:
        line.sendall(request.encode("latin-1"))
        return file.read()


def test_200_clients_at_once_are_all_answered(server: PageServer) -> None:
    """All connect before the first one asks; each gets the whole page, which is rendered once."""
    ask = f"GET /{server.token}/ HTTP/1.1\r\n{HOST}".encode()
    lines = [_connected(server) for _ in range(200)]
    answers = dict.fromkeys(lines, b"")
    with selectors.DefaultSelector() as ready:
        for line in lines:
            line.sendall(ask)
            line.setblocking(False)
            ready.register(line, selectors.EVENT_READ)
        while ready.get_map():
            for key, _ in ready.select():
                part = key.fileobj.recv(1 << 20)
                answers[key.fileobj] += part
                if not part:
                    ready.unregister(key.fileobj)
    for line in lines:
        line.close()

    assert {answer[:15] for answer in answers.values()} == {b"HTTP/1.0 200 OK"}
    assert {answer[-8:].strip() for answer in answers.values()} == {b"</html>"}


def test_one_connection_too_many_is_told_to_come_again(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all places taken by silent clients the next one gets 503 at once; when they are gone it is served."""
    monkeypatch.setattr(live, "MOST_CONNECTIONS", 2)
    silent = [_connected(server) for _ in range(2)]
    with _connected(server) as line:
        assert line.recv(100).startswith(b"HTTP/1.0 503 ")
    for line in silent:
        line.close()

    until = monotonic() + 60
    while b"200 OK" not in _ask(server, f"GET /{server.token}/news HTTP/1.1\r\n{HOST}"):
        assert monotonic() < until


def test_a_request_that_trickles_in_is_cut_off(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that come one by one do not keep a connection open: its time counts from its beginning."""
    monkeypatch.setattr(live, "SILENCE", 0.5)
    pause = threading.Event()
    with _connected(server) as line, pytest.raises(ConnectionError):
        begun = monotonic()
        while monotonic() < begun + 60:
            line.sendall(b"X")
            pause.wait(0.05)


def test_a_client_that_goes_away_disturbs_nobody(server: PageServer, capsys: Any) -> None:
    """A connection that is reset in the middle of an answer is no error, and the next one is answered."""
    for _ in range(5):
        with _connected(server) as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            line.sendall(f"GET /{server.token}/ HTTP/1.1\r\n{HOST}".encode())
    assert b"200 OK" in _ask(server, f"GET /{server.token}/news HTTP/1.1\r\n{HOST}")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("path", ["", "news", "events"])
def test_head_is_answered_without_content(server: PageServer, path: str) -> None:
    """HEAD gives the status and the headers of GET, and ends."""
    head, _, content = _ask(server, f"HEAD /{server.token}/{path} HTTP/1.1\r\n{HOST}").partition(
        b"\r\n\r\n"
    )

    assert head.startswith(b"HTTP/1.0 200 OK")
    assert b"no-store" in head
    assert content == b""


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("POST /{}/ HTTP/1.1", 501),
        ("OPTIONS * HTTP/1.1", 501),
        ("<script> /{}/ HTTP/1.1", 501),
        ("GET /" + "a" * 70_000 + " HTTP/1.1", 414),
        ("GET /{}/ HTTP/9.1", 505),
        ("GET", 400),
        ("\x16\x03\x01 \x00", 400),
        ("GET /{}/ HTTP/1.1\r\n" + "\r\n".join(f"X-{i}: 1" for i in range(200)), 431),
        ("GET /{}/ HTTP/1.1\r\nHost: localhost", 403),  # and a second one follows
        ("GET http://localhost/{}/ HTTP/1.1", 403),
    ],
)
def test_what_is_no_request_for_the_page_is_refused(
    server: PageServer, request_line: str, status: int
) -> None:
    """Other methods, long addresses and garbage get a status and the same headers, and nothing is repeated to them."""
    answer = _ask(server, f"{request_line.replace('{}', server.token)}\r\n{HOST}")

    assert answer.startswith(f"HTTP/1.0 {status} ".encode())
    assert b"nosniff" in answer
    assert b"script" not in answer
    assert server.token.encode() not in answer
