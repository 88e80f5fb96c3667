"""What a command looks like."""

from __future__ import annotations

import argparse
from typing import Protocol

from kedge.program.ending import Ending


class Command(Protocol):
    """One word after ``kedge``; its docstring is its help text, its first line the short one."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Say what can be typed after the command."""

    def run(self, args: argparse.Namespace) -> int | Ending:
        """Do it.

        Returns:
            The exit status, or the ending of the program that was run.

        Raises:
            KedgeError: What was asked for cannot be done.
        """
