"""``kedge explain``: the explanation of a rule."""

from __future__ import annotations

import argparse

from kedge.cli.config import add_config
from kedge.cli.documents import explained
from kedge.cli.output import print_json


class ExplainCommand:
    """Explain a rule: its meaning, formula, thresholds and remedy.

    Without a code, list all rules. The thresholds are those of this project.

    --json prints a list of objects: {"code", "severity", "name", "thresholds", "page"}.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        parser.add_argument(
            "code",
            metavar="CODE",
            nargs="?",
            help="the code of a finding, such as NAN-BORN",
        )
        parser.add_argument(
            "--thresholds",
            action="store_true",
            help="print the thresholds of all rules, in the form of pyproject.toml",
        )
        parser.add_argument(
            "--json",
            action="store_true",
            help="print a list of objects",
        )
        add_config(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Print the explanation, the thresholds, or the list."""
        from kedge.rules.project_config import configured_rules
        from kedge.rules.registry import ALL, explain, known_code
        from kedge.rules.settings import toml

        # Rules that the settings leave out can be explained too.
        every = ",".join(rule.code for rule in ALL)
        rules = configured_rules(every, None, args.config)
        chosen = list(rules)
        if args.code is not None:
            code = known_code(args.code)
            chosen = [rule for rule in rules if rule.code == code]
        if args.json:
            print_json([explained(rule, explain(rule.code, rules)) for rule in chosen])
        elif args.thresholds:
            print(toml(chosen, ALL), end="")
        elif args.code is not None:
            print(explain(args.code, rules), end="")
        else:
            width = max(len(rule.code) for rule in rules)
            for rule in rules:
                print(f"{rule.code:<{width}}  {rule.severity:<7}  {rule.name}")
        return 0
