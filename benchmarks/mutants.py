"""How many faults the tests notice: a sample of mutants, each run against the tests of its own folder.

A mutant is Kedge with one small change, made by cosmic-ray's operators: ``<`` became ``<=``, a
number one larger, a loop is never entered. A test that fails kills it. A survivor is a fault that
no test of its folder would notice, or a change that makes no difference; which of them it is, a
reader decides.

    make mutants
    python benchmarks/mutants.py [--each 40] [--seed 0] [--limit 120] [--tree ANOTHER/CHECKOUT] [--only hooks/handle.py:31]

Places are drawn, not mutants: cosmic-ray knows eleven mutants of a ``+`` and one of an ``and``. A
seed draws the same places of another state of the source, but for those whose lines have changed.
Left out are annotations and what only a type checker reads, the ``*`` of a signature, and
comparisons of ``is`` but for its negation; cosmic-ray changes no strings, so no docstrings. Tests
marked `full` are not run: they are more cases of the same kinds. Source and tests are copied first,
and only the copy is changed. What failed must pass on the copy without the mutant: a test that does
not is left out. Results are kept in ``build/mutants-*.jsonl``, one file for each state of source and
tests: a measurement that was interrupted goes on there.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import dataclasses
import difflib
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from cosmic_ray import plugins
from cosmic_ray.ast import Visitor, get_ast
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/kedge")
AREAS = {
    "core": ("hooks", "actions", "sites", "flow.py"),
    "rules": ("rules",),
    "offload": ("offload",),
}
FOLDER_OF = {Path("flow.py"): Path("hooks")}
"""The tests of files that lie in no folder."""

IDENTITY = re.compile(r"_(Is|IsNot)_(?!Is|IsNot)|Comparison.*(?<!_Is)(?<!_IsNot)_(Is|IsNot)$")
"""Operators between ``is`` and others: ``==`` hardly ever differs from it, and no object is less than None."""

ARGUMENTS = re.compile(r"Variable(Replacer|Inserter)$")
"""Operators that want to be told what to change."""

IMPORTED = ("torch._dynamo", "numpy")
"""Imported once: each mutant is tested in a fork of this process."""

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
MEMORY = 16 * 2**30
FILE = 4 * 2**30
"""What a process of the tests may take, in bytes: a mutant can ask for everything there is."""

FORK = multiprocessing.get_context("fork")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A change of one place; `path` is relative to the tree."""

    area: str
    path: str
    line: int
    operator: str
    occurrence: int
    before: str
    after: str

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a mutant: ``killed``, ``timed out`` or ``survived``; and the test at which it did."""

    verdict: str
    test: str
    seconds: float = 0.0


def main() -> None:
    """Draw the mutants, test each, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--each", type=int, default=40, help="mutants of each area")
    parser.add_argument("--seed", type=int, default=0, help="which sample")
    parser.add_argument(
        "--limit", type=int, default=120, help="seconds a test may take; longer counts as killed"
    )
    parser.add_argument(
        "--tree", type=Path, default=ROOT, help="the checkout to measure; this one unless given"
    )
    parser.add_argument(
        "--only",
        default="",
        help="of the sample, those at such a place, whether measured before or not",
    )
    args = parser.parse_args()
    for name in IMPORTED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="kedge-mutants-") as folder:
        bench = Bench(Path(folder), args.tree, args.limit)
        chosen = [
            mutant
            for mutant in sample(bench.copy, args.each, args.seed)
            if args.only in mutant.place
        ]
        log = ROOT / "build" / f"mutants-{digest(bench.copy, args.seed)}.jsonl"
        known = {} if args.only else read(log)
        print(
            f"{len(chosen)} mutants of seed {args.seed}, of which {len(known.keys() & set(chosen))} are in {log}",
            flush=True,
        )
        with contextlib.suppress(KeyboardInterrupt):
            measure(bench, chosen, known, log)
        for test in bench.left_out:
            print(f"left out, as it fails or takes too long without a mutant too: {test}")
    table(chosen, known)


def measure(
    bench: Bench, chosen: Sequence[Mutant], known: dict[Mutant, Outcome], log: Path
) -> None:
    """Test the mutants that are not known yet, and write each down."""
    todo = [mutant for mutant in chosen if mutant not in known]
    if todo:
        bench.must_collect(todo)
    log.parent.mkdir(exist_ok=True)
    for number, mutant in enumerate(todo, len(chosen) - len(todo) + 1):
        known[mutant] = outcome = bench.outcome(mutant)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps([dataclasses.asdict(mutant), dataclasses.asdict(outcome)]) + "\n")
        print(
            f"{number:4}/{len(chosen)} {outcome.verdict:9} {outcome.seconds:6.1f} s  {mutant.place}  "
            f"{mutant.before}  ->  {mutant.after}  [{outcome.test}]",
            flush=True,
        )


def read(log: Path) -> dict[Mutant, Outcome]:
    """Return what a measurement before this one found."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    pairs = map(json.loads, lines)
    return {Mutant(**mutant): Outcome(**outcome) for mutant, outcome in pairs}


def digest(tree: Path, seed: int) -> str:
    """Return a name for a state of source and tests."""
    whole = hashlib.sha256(str(seed).encode())
    for path in sorted(
        itertools.chain((tree / "src").rglob("*.py"), (tree / "tests").rglob("*.py"))
    ):
        whole.update(str(path.relative_to(tree)).encode() + b"\0" + path.read_bytes() + b"\0")
    return whole.hexdigest()[:12]


def table(chosen: Sequence[Mutant], known: dict[Mutant, Outcome]) -> None:
    """Print the figures of each area, and every survivor."""
    print(
        f"\n{'area':8} {'mutants':>7} {'killed':>7} {'timed out':>9} {'survived':>8}  killed or timed out"
    )
    for area in (*AREAS, "all"):
        found = [known[m].verdict for m in chosen if m in known and area in {m.area, "all"}]
        count = collections.Counter(found)
        share = f"{1 - count['survived'] / len(found):.3f}" if found else "-"
        print(
            f"{area:8} {len(found):7} {count['killed']:7} {count['timed out']:9} {count['survived']:8}  {share}"
        )
    print("\nsurvivors:")
    for mutant in chosen:
        if mutant in known and known[mutant].verdict == "survived":
            print(f"{mutant.place}  {mutant.operator}\n    - {mutant.before}\n    + {mutant.after}")


def sample(tree: Path, each: int, seed: int) -> list[Mutant]:
    """Return mutants of each area in turn; a larger sample begins with the smaller one."""
    areas = [itertools.islice(mutants(tree, area, seed), each) for area in AREAS]
    return [mutant for row in itertools.zip_longest(*areas) for mutant in row if mutant is not None]


def mutants(tree: Path, area: str, seed: int) -> Iterator[Mutant]:
    """Yield one mutant of each place of an area, in random order."""
    operators = operators_without_arguments()
    found: list[tuple[str, Path, int, list[tuple[str, int]]]] = []
    for path in files(tree, area):
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        finder = Places(operators)
        finder.walk(get_ast(source))
        alike: collections.Counter[str] = collections.Counter()
        for ((line, column), _), changes in sorted(finder.found.items()):
            place = f"{seed} {path.relative_to(tree).as_posix()} {column} {lines[line - 1]}"
            alike[place] += 1
            found.append((lot(f"{place} {alike[place]}"), path, line, changes))
    for drawn, path, line, changes in sorted(found):
        source = path.read_text(encoding="utf-8")
        meant = meaning(source)
        in_turn = sorted((lot(f"{drawn} {i}"), change) for i, change in enumerate(changes))
        for _, (name, occurrence) in in_turn:
            changed = mutate_code(source, operators[name], occurrence)
            if changed is not None and meaning(changed) not in {meant, None}:
                where = path.relative_to(tree).as_posix()
                yield Mutant(area, where, line, name, occurrence, *difference(source, changed))
                break


def lot(text: str) -> str:
    """Return a place's lot, by which it is drawn: as long as its line is the same, whatever else is changed."""
    return hashlib.sha256(text.encode()).hexdigest()


def files(tree: Path, area: str) -> list[Path]:
    """Return an area's files, in order."""
    places = [tree / PACKAGE / name for name in AREAS[area]]
    return sorted(
        path for place in places for path in ([place] if place.is_file() else place.rglob("*.py"))
    )


def operators_without_arguments() -> dict[str, Any]:
    """Return cosmic-ray's operators by name."""
    names = [
        name
        for name in plugins.operator_names()
        if not IDENTITY.search(name) and not ARGUMENTS.search(name)
    ]
    return {name: plugins.get_operator(name)() for name in names}


class Places(Visitor):  # type: ignore[misc]
    """Collects, by place, the operators that can change it, and which of an operator's changes it is."""

    def __init__(self, operators: dict[str, Any]) -> None:
        self.operators = operators
        self.found: dict[Any, list[tuple[str, int]]] = collections.defaultdict(list)
        self.seen: collections.Counter[str] = collections.Counter()

    def visit(self, node: Any) -> Any:
        for name, operator in self.operators.items():
            for place in operator.mutation_positions(node):
                self.found[place].append((name, self.seen[name]))
                self.seen[name] += 1
        return node


def meaning(source: str) -> str | None:
    """Return a text that is the same for programs that do the same but for what a type checker reads; None for no program."""
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return None
    return ast.dump(Executed().visit(ast.parse(source)))


class Executed(ast.NodeTransformer):
    """Takes out of a program what makes no difference when it is executed.

    Every file begins with ``from __future__ import annotations``.
    """

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        """Whether an argument is given by its name, the callers decide: they are Kedge's own."""
        node.args = [*node.posonlyargs, *node.args, *node.kwonlyargs]
        node.defaults += [default for default in node.kw_defaults if default is not None]
        node.posonlyargs = node.kwonlyargs = node.kw_defaults = []
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if isinstance(node.annotation, ast.Name) and node.annotation.id == "TypeAlias":
            return ast.Pass()
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        if any(
            isinstance(part, ast.Name) and part.id == "TYPE_CHECKING"
            for part in ast.walk(node.test)
        ):
            return ast.Pass()
        return self.generic_visit(node)


def difference(source: str, changed: str) -> tuple[str, str]:
    """Return the lines that a mutant changes, and what they became."""
    lines = list(difflib.ndiff(source.splitlines(), changed.splitlines()))
    before, after = (
        " ".join(line[2:].strip() for line in lines if line.startswith(sign)) for sign in "-+"
    )
    return before, after


class Bench:
    """A copy of a checkout, in which mutants are made and tested."""

    def __init__(self, folder: Path, tree: Path, limit: float) -> None:
        self.copy = folder / "tree"
        self.output = folder / "output"
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.limit = limit
        self.sound: set[str] = set()
        self.left_out: list[str] = []
        shutil.copytree(
            tree, self.copy, ignore=shutil.ignore_patterns(".*", "build", "__pycache__")
        )

    def must_collect(self, chosen: Sequence[Mutant]) -> None:
        """Stop here if the tests cannot even be imported without a mutant."""
        tests = sorted({path for mutant in chosen for path in self.tests(mutant)})
        verdict = self.run("--collect-only", *tests)
        if verdict.verdict != "survived":
            raise SystemExit(f"without any mutant:\n{self.output.read_text(encoding='utf-8')}")

    def outcome(self, mutant: Mutant) -> Outcome:
        """Test a mutant; of a test that fails, or takes too long, without it too, nothing is learned."""
        began = time.monotonic()
        source = (self.copy / mutant.path).read_text(encoding="utf-8")
        operator = plugins.get_operator(mutant.operator)()
        while True:
            with self.changed(mutant.path, mutate_code(source, operator, mutant.occurrence)):
                found = self.run("-x", *self.tests(mutant))
            if found.verdict == "survived" or self.is_sound(found.test):
                return dataclasses.replace(found, seconds=round(time.monotonic() - began, 1))
            self.left_out.append(found.test)

    def is_sound(self, test: str) -> bool:
        """Whether a test passes without a mutant; whole files were imported without one before."""
        if "::" in test and test not in self.sound and self.run(test).verdict == "survived":
            self.sound.add(test)
        return "::" not in test or test in self.sound

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the test files of a mutant's folder, or the nearest one above; those named after its file first."""
        path = Path(mutant.path).relative_to(PACKAGE)
        folder = self.copy / "tests" / FOLDER_OF.get(path, path.parent)
        while not any(folder.glob("test_*.py")):
            folder = folder.parent
        found = sorted(
            folder.glob("test_*.py"),
            key=lambda test: (not test.stem.startswith(f"test_{path.stem}"), test),
        )
        return [test.relative_to(self.copy).as_posix() for test in found]

    @contextlib.contextmanager
    def changed(self, path: str, source: str) -> Iterator[None]:
        """Put a mutant into the copy, and the source back after it."""
        before = (self.copy / path).read_text(encoding="utf-8")
        self._write(path, source)
        try:
            yield
        finally:
            self._write(path, before)

    def _write(self, path: str, source: str) -> None:
        """Write a file whose compiled one has to go: both may have the same second and size."""
        file = self.copy / path
        file.write_text(source, encoding="utf-8")
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
            compiled.unlink()

    def run(self, *arguments: str) -> Outcome:
        """Run pytest in a process of its own, and stop all that it started."""
        receiver, sender = FORK.Pipe(duplex=False)
        left_out = [f"--deselect={test}" for test in self.left_out]
        process = FORK.Process(target=self._run_here, args=(sender, [*left_out, *arguments]))
        process.start()
        sender.close()
        try:
            return self._follow(process, receiver)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()

    def _follow(self, process: Any, receiver: Connection) -> Outcome:
        """Hear which test runs, until one fails, the last one passes, or one takes too long."""
        test, last = "", time.monotonic()
        while time.monotonic() - last < self.limit:
            lives = process.is_alive()
            with contextlib.suppress(EOFError):
                if receiver.poll(0.5):
                    word, test = receiver.recv()
                    last = time.monotonic()
                    if word != "runs":
                        return Outcome(word, test)
                    continue
            if not lives:
                return Outcome("killed", test)
        return Outcome("timed out", test)

    def _run_here(self, sender: Connection, arguments: list[str]) -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, FILE))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(self.copy)
        os.environ |= QUIET | {"PYTHONPATH": str(self.copy / "src"), "TMPDIR": str(self.temporary)}
        tempfile.tempdir = None
        sys.path[:1] = [str(self.copy), str(self.copy / "src")]
        sys.argv[1:] = []
        options = ["-q", "-p", "no:cacheprovider", "-p", "hypothesispytest", "--hypothesis-seed=0"]
        status = pytest.main([*options, *arguments], plugins=[Reporting(sender)])
        ran = status in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
        sender.send(("survived", "") if ran else ("killed", f"pytest ended with {status}"))


class Reporting:
    """A plugin of pytest that says which test runs and which failed."""

    def __init__(self, sender: Connection) -> None:
        self.sender = sender

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.sender.send(("runs", nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.sender.send(("killed", report.nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.sender.send(("killed", report.nodeid))


if __name__ == "__main__":
    main()
