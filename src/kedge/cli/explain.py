"""``kedge explain``: the explanation of a rule."""

from __future__ import annotations

import argparse

from kedge.cli.config import add_config
from kedge.cli.documents import ExplainedCode, explained
from kedge.cli.output import print_json


class ExplainCommand:
    """Explain a rule: its meaning, formula, thresholds and remedy.

    Without a code, list all rules. The thresholds are those of this project. DEPARTS, the code of
    kedge check --against, is explained too; its thresholds cannot be set.

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
        from kedge.compare.against import departs
        from kedge.rules.project_config import configured_rules
        from kedge.rules.registry import ALL, explain, known_code
        from kedge.rules.settings import thresholds, toml

        # Rules that the settings leave out can be explained too.
        every = ",".join(rule.code for rule in ALL)
        rules = configured_rules(every, None, args.config)
        pages = [
            ExplainedCode(
                rule.code, rule.severity, rule.name, thresholds(rule), explain(rule.code, rules)
            )
            for rule in rules
        ]
        of_departs = departs.Departs
        pages.append(
            ExplainedCode(of_departs.code, of_departs.severity, of_departs.name, {}, departs.page())
        )
        if args.code is not None:
            code = known_code(args.code, [departs.CODE])
            pages = [each for each in pages if each.code == code]
        if args.json:
            print_json([explained(each) for each in pages])
        elif args.thresholds:
            codes = [each.code for each in pages]
            print(toml([rule for rule in rules if rule.code in codes], ALL), end="")
        elif args.code is not None:
            print(pages[0].page, end="")
        else:
            width = max(len(each.code) for each in pages)
            for each in pages:
                print(f"{each.code:<{width}}  {each.severity:<7}  {each.name}")
        return 0
