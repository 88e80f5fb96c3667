"""``kedge completion``: a script that completes commands, options and names of recordings in a shell.

The script is made from the parsers of all commands, so that completing starts no Python, and
nothing has to be installed.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kedge.cli.parser import CommandParser

#: What completes an argument, by its name.
KINDS = {
    "recording": "recording",
    "recordings": "recording",
    "a": "recording",
    "b": "recording",
    "script": "script",
    "code": "word",
    "shell": "word",
}


@dataclass(frozen=True)
class CompletedCommand:
    """The words that may follow a command.

    Attributes:
        name: The command.
        about: One line about it.
        options: Its long options, or else short ones, each with its help.
        kind: What its arguments are: ``recording``, ``script``, ``word`` or ``file``.
        words: The words of an argument that is one of a few.
    """

    name: str
    about: str
    options: Mapping[str, str]
    kind: str
    words: tuple[str, ...]


class CompletionCommand:
    """Print the script for tab completion in bash, zsh or fish.

    bash: eval "$(kedge completion bash)" in ~/.bashrc
    zsh:  eval "$(kedge completion zsh)" in ~/.zshrc, after compinit
    fish: kedge completion fish > ~/.config/fish/completions/kedge.fish
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        parser.add_argument(
            "shell",
            metavar="SHELL",
            choices=tuple(SHELLS),
            help=", ".join(SHELLS),
        )

    def run(self, args: argparse.Namespace) -> int:
        """Print the script."""
        print(SHELLS[args.shell](list(_completed(args.commands))), end="")
        return 0


def _completed(commands: Mapping[str, CommandParser]) -> Iterator[CompletedCommand]:
    for name, parser in commands.items():
        kind = "file"
        words: tuple[str, ...] = ()
        for action in parser.arguments:
            if not action.option_strings and action.dest in KINDS:
                kind = KINDS[action.dest]
                words = tuple(action.choices or ())
                break
        if name == "explain":
            words = _codes()
        yield CompletedCommand(name, parser.short, dict(_options(parser)), kind, words)


def _options(parser: CommandParser) -> Iterator[tuple[str, str]]:
    for action in parser.arguments:
        if action.option_strings:
            yield action.option_strings[-1], (action.help or "").replace("%%", "%")


def _codes() -> tuple[str, ...]:
    from kedge.compare.against.departs import CODE
    from kedge.rules.registry import ALL

    return (*(rule.code for rule in ALL), CODE)


def _bash(commands: list[CompletedCommand]) -> str:
    cases = "\n".join(
        f"        {each.name}) options={shlex.quote(' '.join(each.options))} kind={each.kind} "
        f"words={shlex.quote(' '.join(each.words))} ;;"
        for each in commands
    )
    names = " ".join(each.name for each in commands)
    return f"""\
_kedge() {{
    local IFS=$'\\n' word=${{COMP_WORDS[COMP_CWORD]}} options= kind= words=
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "$(printf '%s\\n' {names} help --help --version)" -- "$word"))
        return
    fi
    case ${{COMP_WORDS[1]}} in
        help) words='{names}' kind=word ;;
{cases}
    esac
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "${{options// /$IFS}}" -- "$word"))
        return
    fi
    case $kind in
        recording) COMPREPLY=($(compgen -d -- "$word" | grep '\\.kedge$')) ;;
        script) COMPREPLY=($(compgen -f -X '!*.py' -- "$word")) ;;
        word) COMPREPLY=($(compgen -W "${{words// /$IFS}}" -- "$word")) ;;
    esac
}}
complete -o default -F _kedge kedge
"""


def _zsh(commands: list[CompletedCommand]) -> str:
    cases = "\n".join(
        f"        {each.name}) kind={each.kind} words_of=({' '.join(each.words)}) "
        f"options=({_described(each.options)}) ;;"
        for each in commands
    )
    return f"""\
#compdef kedge
_kedge() {{
    local kind= name=
    local -a commands options words_of found
    commands=({_described({each.name: each.about for each in commands})})
    if ((CURRENT == 2)); then
        _describe command commands
        return
    fi
    case $words[2] in
        help) _describe command commands; return ;;
{cases}
    esac
    if [[ $PREFIX == -* ]]; then
        _describe -o option options
        return
    fi
    case $kind in
        recording) found=(*.kedge(N/)); compadd -a found; (($#found)) || _files ;;
        word) compadd -a words_of ;;
        *) _files ;;
    esac
}}
compdef _kedge kedge
"""


def _described(words: Mapping[str, str]) -> str:
    return " ".join(shlex.quote(f"{word}:{text}") for word, text in words.items())


def _fish(commands: list[CompletedCommand]) -> str:
    lines = [
        "function __kedge_recordings",
        "    for name in *.kedge",
        "        echo $name",
        "    end",
        "end",
    ]
    for each in commands:
        lines.append(
            f"complete -c kedge -n __fish_use_subcommand -f -a {each.name} -d {_fish_text(each.about)}"
        )
        here = f"complete -c kedge -n '__fish_seen_subcommand_from {each.name}'"
        if each.kind == "recording":
            lines.append(f"{here} -f -a '(__kedge_recordings)'")
        elif each.kind == "word":
            lines.append(f"{here} -f -a {_fish_text(' '.join(each.words))}")
        for option, text in each.options.items():
            flag = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            lines.append(f"{here} {flag} -d {_fish_text(text)}")
    return "\n".join([*lines, ""])


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS = {"bash": _bash, "fish": _fish, "zsh": _zsh}
