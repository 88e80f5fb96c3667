"""``kedge explain``: print a rule's page."""

from __future__ import annotations

import argparse

from kedge.cli.config import add_config, configured_rules


class Explain:
    """Print the page of a rule: what it says, how it decides, and what helps.

    Without a code, all rules are listed. Thresholds are shown as they are set here.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Say what can be typed after the command."""
        parser.add_argument("code", metavar="CODE", nargs="?", help="the code of a finding, such as NAN-BORN")
        parser.add_argument(
            "--thresholds", action="store_true", help="print the thresholds of all rules, as pyproject.toml has them"
        )
        add_config(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Print the page, the thresholds, or the list."""
        from kedge.rules.registry import ALL, explain, known_code
        from kedge.rules.settings import toml

        every = ",".join(rule.code for rule in ALL)  # a rule that is left out here can be explained all the same
        rules = configured_rules(every, None, args.config)
        if args.thresholds:
            wanted = {known_code(args.code)} if args.code is not None else {rule.code for rule in rules}
            print(toml([rule for rule in rules if rule.code in wanted], ALL), end="")
        elif args.code is not None:
            print(explain(args.code, rules), end="")
        else:
            width = max(len(rule.code) for rule in rules)
            for rule in rules:
                print(f"{rule.code:<{width}}  {rule.severity:<7}  {rule.name}")
        return 0
