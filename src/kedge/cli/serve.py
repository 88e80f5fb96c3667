"""``kedge serve``: a recording in the browser while it grows."""

from __future__ import annotations

import argparse
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from kedge.cli.config import add_config
from kedge.cli.recordings import add_recording, recording_named
from kedge.cli.sites_option import add_sites, only_sites
from kedge.errors import CannotServe

if TYPE_CHECKING:
    from kedge.report.page.document import Document
    from kedge.report.page.live import News, PageServer
    from kedge.store.recording import Recording


class ServeCommand:
    """Show a recording in the browser while it grows; Ctrl-C stops the server.

    The page is that of kedge report --html, and follows the run. Only this machine can open
    it, at an address that contains a new token each time.

    ADDRESS/metrics has the loss, the gradient norm, the steps and the number of findings, for
    Prometheus; with --token-file it also reads them at http://localhost:PORT/metrics.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        add_recording(parser)
        parser.add_argument(
            "--port",
            type=_port,
            default=0,
            help="the port (default: a free one)",
        )
        add_sites(parser, "let the page begin with this filter")
        parser.add_argument(
            "--open",
            action="store_true",
            help="open the page in the browser",
        )
        parser.add_argument(
            "--token-file",
            metavar="FILE",
            help="write the token to this file, for Prometheus to read /metrics with",
        )
        parser.add_argument(
            "--no-source",
            action="store_true",
            help="leave out source lines and their files",
        )
        add_config(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Serve the page until Ctrl-C."""
        from kedge.report.page.document import condense
        from kedge.report.page.live import News, running
        from kedge.report.page.redact import shareable
        from kedge.report.shown_run import ShownRun
        from kedge.report.what_ran import is_written
        from kedge.rules.project_config import configured_rules
        from kedge.rules.registry import check
        from kedge.store.follow import Follower, Pace
        from kedge.store.recording import Recording

        rules = configured_rules(config=args.config)
        pace = Pace()

        def condensed(recording: Recording) -> Document:
            shown = shareable(recording, source=not args.no_source)
            reached = pace.at(recording, time.monotonic())
            findings = check(shown, rules)
            return condense(ShownRun(shown, findings, rules, is_written(recording), reached))

        name = recording_named(args.recording)
        follower = Follower(name)
        # Any other file is refused here, with a message that names its kind.
        recording = follower.poll() or Recording.open(name)
        if recording.sites:  # a run that has only begun has none yet
            only_sites(recording, args.sites)
        news = News(follower, condensed, recording)
        server = _server(news, args.port)
        with running(server):
            if args.token_file:
                _write_secret(args.token_file, server.token)
            address = server.address
            if args.sites:
                address += f"#{urlencode({'filter': args.sites})}"
            print(f"{name} is served at {address}\npress Ctrl-C to stop", flush=True)
            if args.open:
                import webbrowser

                webbrowser.open(address)
            try:
                while True:
                    time.sleep(news.refresh())
            except KeyboardInterrupt:
                print()
        return 0


def _server(news: News, port: int) -> PageServer:
    from kedge.report.page.live import PageServer

    try:
        return PageServer(news, port)
    except OSError as error:
        raise CannotServe(
            f"cannot serve on port {port}: {error.strerror or error}; "
            "name another with --port, or leave --port "
            "out for a free one"
        ) from error


def _write_secret(name: str, token: str) -> None:
    """Write the token to a file that only its owner can read."""
    try:
        with suppress(FileNotFoundError):
            os.unlink(name)
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(token)
    except OSError as error:
        raise CannotServe(
            f"cannot write the token to {name}: {error.strerror or error}; "
            "name another file with --token-file"
        ) from error


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a port; name a number up to 65535, or 0 for a free port"
        )
    return int(text)
