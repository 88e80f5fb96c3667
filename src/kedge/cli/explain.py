"""``kedge explain``: print a rule's page."""

from __future__ import annotations

import argparse


class Explain:
    """Print the page of a rule: what it says, how it decides, and what helps.

    Without a code, all rules are listed.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Say what can be typed after the command."""
        parser.add_argument("code", metavar="CODE", nargs="?", help="the code of a finding, such as NAN-BORN")

    def run(self, args: argparse.Namespace) -> int:
        """Print the page, or the list."""
        from kedge.rules.registry import ALL, explain

        if args.code is not None:
            print(explain(args.code), end="")
            return 0
        width = max(len(rule.code) for rule in ALL)
        for rule in ALL:
            print(f"{rule.code:<{width}}  {rule.severity:<7}  {rule.name}")
        return 0
