"""What can be asked of a tool that looks into PyTorch models, each row run and checked against plain PyTorch.

A row is a small program with a known answer. Where a tool that pip can install does the same with
little effort, its column is run too; the others are left out, and so is a tool that is not there.
Every column is a process of its own, since some tools change PyTorch when they are first used.

    pip install --no-deps --target FOLDER captum nnsight torchlens graphviz tqdm
    PYTHONPATH=FOLDER python benchmarks/capabilities.py [--rows 1,17,35]

Yes is a result that is right; no is one that is wrong, missing, or refused, with the reason. Where
a tool has no program here, that says nothing about the tool.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from capable import changing, compiled, others, reading, runs
from capable.row import KEDGE, ROWS, Answer, ask

SUBJECTS = (reading, changing, compiled, runs, others)
"""The files whose rows are declared when they are imported."""


def column(tool: str, numbers: list[int]) -> dict[int, Answer]:
    """Ask a tool each row that it has a program for, in this process."""
    tries = {number: ROWS[number].tries.get(tool) for number in numbers}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some tools warn at each call
        return {number: ask(attempt) for number, attempt in tries.items() if attempt is not None}


def column_apart(tool: str, numbers: list[int]) -> dict[int, Answer]:
    """Ask a tool in a process of its own."""
    rows = ",".join(str(number) for number in numbers)
    command = [sys.executable, __file__, "--column", tool, "--rows", rows]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the column of {tool} ended early:\n{done.stderr}")
    answers = json.loads(done.stdout.splitlines()[-1])
    return {int(number): Answer(**answer) for number, answer in answers.items()}


def table(columns: dict[str, dict[int, Answer]], numbers: list[int]) -> str:
    """Write the table, the tools in their order, Kedge with the reason and the seconds."""
    others_of = [tool for tool in columns if tool != KEDGE]
    titles = ["", "", KEDGE, "", "s", *others_of]
    lines = [titles, ["---"] * len(titles)]
    for number in numbers:
        own = columns[KEDGE][number]
        cells = [str(number), ROWS[number].title, own.word, own.why, f"{own.seconds:.2f}"]
        cells += [str(columns[tool].get(number, "")) for tool in others_of]
        lines.append([cell.replace("|", "\\|") for cell in cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def versions(tools: list[str]) -> str:
    """Say what is compared."""
    names = ", ".join(f"{tool} {importlib.metadata.version(tool.lower())}" for tool in tools)
    return f"{names}, PyTorch {torch.__version__}, Python {platform.python_version()}"


def main(arguments: list[str] | None = None) -> None:
    """Print the table, or be one column of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", help="their numbers, separated by commas; all if not given")
    parser.add_argument("--column", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    numbers = sorted(ROWS)
    if args.rows:
        numbers = [int(number) for number in args.rows.split(",")]
    if args.column:
        answers = column(args.column, numbers)
        print(json.dumps({number: asdict(answer) for number, answer in answers.items()}))
        return
    tools = [KEDGE, *others.INSTALLED]
    print(versions(tools), "\n", flush=True)
    print(table({tool: column_apart(tool, numbers) for tool in tools}, numbers))


if __name__ == "__main__":
    main()
