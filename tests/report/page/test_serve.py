"""``kedge serve``: the page follows a run that goes on, and is for nobody else."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kedge.cli.main import main
from kedge.report.head import circumstances, head
from kedge.report.page import live
from kedge.report.page.document import condense
from kedge.report.page.live import News, PageServer, running
from kedge.report.shown_run import ShownRun
from kedge.report.what_ran import is_written
from kedge.rules.registry import check
from kedge.store.events import Position, PositionEvent
from kedge.store.follow import Follower
from kedge.store.recording import Recording
from tests.report.page.runs import Run

pytestmark = pytest.mark.timing

NAN = float("nan")


@pytest.fixture
def served(run: Callable[..., Run], tmp_path: Path) -> Iterator[tuple[Run, PageServer]]:
    """A run of three steps that goes on, and the server of its page."""
    made = run()
    for step in range(3):
        made.step(step)
    follower = Follower(tmp_path / "net.kedge")
    first = follower.poll()
    assert first is not None
    server = PageServer(
        News(follower, lambda recording: condense(ShownRun(recording, check(recording), ())), first)
    )
    with running(server):
        yield made, server
    made.writer.close()


def get(server: PageServer, path: str, **headers: str) -> http.client.HTTPResponse:
    """Ask the server, and read its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    answer.text = answer.read().decode()
    connection.close()
    return answer


def test_the_page_follows_a_run_and_keeps_the_readers_place(
    served: tuple[Run, PageServer], tab: Any
) -> None:
    """When the run goes on the page is drawn anew, with the same site, scroll position, theme and folded modules."""
    made, server = served
    page = tab.open(server.address)
    page.set_viewport_size({"width": 1366, "height": 500})
    page.keyboard.press("t")
    page.evaluate("location.hash = ''")
    page.locator("[data-path='relu1']").click()
    page.locator(".tree .head").first.locator(".name .indent").dispatch_event("click")
    page.evaluate("scrollTo(0, 300)")
    page.wait_for_selector(".live.fine")

    for step in range(3, 7):
        made.step(step, {"relu1:out": NAN, "fc.a:in": NAN, "fc.a:out": NAN} if step == 6 else None)
    server.news.refresh()
    page.wait_for_function("() => document.querySelector('#cells').dataset.columns === '7'")

    assert page.locator("#panel-site").inner_text() == "relu1:out"
    assert "not finite in 1 of 7 columns" in page.locator("#panel").inner_text()
    assert "NAN-BORN" in page.locator("#findings").inner_text()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("scrollY") == 300
    assert page.locator("[data-path='relu1']").is_hidden()

    made.end()
    server.news.refresh()
    page.locator(".pill", has_text="ended").wait_for()
    assert page.locator("#quantity option").count() > 5


def test_the_page_says_when_nobody_serves_it(served: tuple[Run, PageServer], tab: Any) -> None:
    """A page whose server has ended says so, and shows what it has."""
    _, server = served
    page = tab.open(server.address)
    page.wait_for_selector(".live.fine")
    server.shutdown()
    server.close()

    page.wait_for_selector(".live.warning")
    assert "kedge serve" in page.locator("#live").inner_text()
    assert page.locator("#cells").is_visible()
    page.goto("about:blank")
    assert all("ERR_" in error for error in tab.errors)
    tab.errors.clear()


def test_news_come_for_what_happened_while_the_page_was_loaded(
    served: tuple[Run, PageServer],
) -> None:
    """A page that was made before the newest step learns of it as soon as it listens."""
    made, server = served
    made.step(3)
    server.news.refresh()

    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as line:
        line.sendall(f"GET /{server.token}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        said = b""
        while b"event: grown" not in said:
            said += line.recv(1000)

    assert b"text/event-stream" in said
    assert json.loads(get(server, f"/{server.token}/news").text)["document"]["run"]["sampled"] == 4


def test_a_wrong_token_is_refused(served: tuple[Run, PageServer]) -> None:
    """Without the token of this very server nothing is answered, not even what there is."""
    _, server = served
    wrong = server.token[:-1] + ("a" if server.token[-1] != "a" else "b")

    for path in ("/", "/news", f"/{wrong}/", f"/{wrong}/news", f"/{server.token}x/", "//", "/%00/"):
        answer = get(server, path)
        assert (answer.status, "Net" in answer.text) == (403, False)
    assert get(server, f"/{server.token}/").status == 200


@pytest.mark.parametrize("path", ["../", "manifest.json", "events/", "page.css", "news/x", ".."])
def test_nothing_but_the_page_is_served(served: tuple[Run, PageServer], path: str) -> None:
    """There is no folder to list and no file to read."""
    assert get(served[1], f"/{served[1].token}/{path}").status == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("localhost.evil", 403),
        ("", 403),
    ],
)
def test_a_foreign_name_is_refused(served: tuple[Run, PageServer], host: str, status: int) -> None:
    """A request that reached this machine under another name than its own gets nothing."""
    assert get(served[1], f"/{served[1].token}/", Host=host).status == status


def test_answers_are_kept_to_the_page(served: tuple[Run, PageServer]) -> None:
    """No frame, no store and no referrer carries the page or its address elsewhere, and it may ask its server alone."""
    answer = get(served[1], f"/{served[1].token}/")

    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Server"] == "kedge"
    assert "connect-src &#x27;self&#x27;" in answer.text
    assert "access-control-allow-origin" not in {name.lower() for name in answer.headers}


def test_the_server_listens_on_this_machine_alone(served: tuple[Run, PageServer]) -> None:
    """The address it listens on is the loopback's."""
    assert served[1].socket.getsockname()[0] == "127.0.0.1"


def test_an_address_without_its_last_slash_is_led_on(served: tuple[Run, PageServer]) -> None:
    """What the page asks for is relative, so its own address has to end in a slash."""
    answer = get(served[1], f"/{served[1].token}")

    assert (answer.status, answer.headers["Location"]) == (308, f"/{served[1].token}/")


def test_the_end_waits_for_nobody(served: tuple[Run, PageServer]) -> None:
    """Readers that listen, and connections that say nothing, do not hold the server back; no thread is left."""
    _, server = served
    silent = socket.create_connection(("127.0.0.1", server.server_port))
    listening = socket.create_connection(("127.0.0.1", server.server_port))
    listening.sendall(f"GET /{server.token}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert listening.recv(9) == b"HTTP/1.0 "

    server.shutdown()
    server.close()

    assert [
        thread.name for thread in threading.enumerate() if "process_request_thread" in thread.name
    ] == []
    silent.close()
    listening.close()


def test_serve_says_where_and_ends_with_ctrl_c(run: Callable[..., Run], tmp_path: Path) -> None:
    """The command prints the address, serves the page there, and ends with 0 and without a traceback."""
    made = run()
    made.step(0)
    made.end()
    command = [sys.executable, "-m", "kedge", "serve", "net.kedge", "--no-source"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    address = re.search(
        r"net\.kedge is served at http://127\.0\.0\.1:(\d+)(/\S+/)", process.stdout.readline()
    )
    assert address
    connection = http.client.HTTPConnection("127.0.0.1", int(address[1]), timeout=20)
    connection.request("GET", address[2])
    page = connection.getresponse().read().decode()
    connection.close()
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)

    assert 'data-source="live"' in page
    assert "secret" not in page
    assert (process.returncode, err) == (0, "")


def test_a_port_that_is_taken_is_refused(
    run: Callable[..., Run], tmp_path: Path, capsys: Any
) -> None:
    """The message names the port and what to do."""
    run().end()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(tmp_path / "net.kedge"), "--port", str(port)]) == 2

    assert capsys.readouterr().err == (
        f"kedge: cannot serve on port {port}: Address already in use; name another with --port, or leave --port out for a free one\n"
    )


def test_what_is_no_recording_is_refused(tmp_path: Path, capsys: Any) -> None:
    """Nothing is served for a folder that is not there."""
    assert main(["serve", str(tmp_path / "no.kedge")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_what_is_no_port_is_refused(capsys: Any) -> None:
    """A port is a number up to 65535."""
    with pytest.raises(SystemExit):
        main(["serve", "x.kedge", "--port", "70000"])
    assert "'70000' is not a port" in capsys.readouterr().err


def test_the_page_and_the_report_tell_a_killed_run_from_a_running_one(
    run: Callable[..., Run], tmp_path: Path, tab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as a process holds the recording's lock it runs; once none does, it was killed, and the page says so."""
    monkeypatch.setattr(live, "QUIET", 0.0)
    made = run()
    made.step(0)
    follower = Follower(tmp_path / "net.kedge")
    news = News(
        follower,
        lambda recording: condense(ShownRun(recording, (), (), written=is_written(recording))),
        follower.poll(),
    )
    server = PageServer(news)
    with running(server):
        page = tab.open(server.address)
        assert page.locator("#status .pill").inner_text() == "running"
        assert "1 measured so far" in page.locator("#facts").inner_text()
        assert "the program is running; the last" in str(
            list(head(Recording.open(follower.path)))[-1]
        )

        look = PositionEvent(
            position=Position(step=1, module="fc", direction="forward"),
            since="2026-01-01T10:00:00+00:00",
            seen="2026-01-01T10:00:08+00:00",
        )
        line = json.dumps(look.entry())
        (follower.path / "position.json").write_text(f"{line}\n", encoding="utf-8")
        news.refresh()
        assert page.locator("#troubles").inner_text() == ""

        made.writer.close()
        news.refresh()
        page.wait_for_selector(".pill.error")
        assert page.locator("#status .pill").inner_text() == "✗ killed: the recording has no end"
        assert page.locator("#troubles").inner_text() == (
            "The program was last seen in the forward of fc, step 1, at 10:00:08 UTC, "
            "first seen there 8 s before."
        )
        assert "so far" not in page.locator("main").inner_text()
        assert "1 step measured" in map(str, circumstances(Recording.open(follower.path)))
        *_, killed, seen = map(str, head(Recording.open(follower.path)))
        assert "the program was killed, or could not write any more; the last" in killed
        assert "was last seen in the forward of fc, step 1" in seen
        page.goto("about:blank")
