"""The protocol of commands."""

from __future__ import annotations

import argparse
from typing import Protocol

from kedge.program.ending import Ending


class Command(Protocol):
    """One word after ``kedge``; its docstring is its help text, its first line the short one."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""

    def run(self, args: argparse.Namespace) -> int | Ending:
        """Run the command.

        Returns:
            The exit status, or the ending of the program that was run.

        Raises:
            KedgeError: The command cannot be carried out.
        """
