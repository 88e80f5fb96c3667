"""What torchtest2, neural_net_checklist and `kedge examine` say of the same small scripts, faulty and repaired.

    python benchmarks/beside_torchtest.py [--only PATTERN] [--said]

The two libraries go into build/beside-torchtest, so that nothing of the environment changes; where
they cannot be had, nothing is compared. `beside_torchtest.toml` has the scripts: the twelve kinds
of faults that torchtest2 shows in its own documentation, and those for which neural_net_checklist
has a check, written anew. The libraries are handed what their functions ask for: model, batch,
loss and optimizer, the names of what is frozen, a wish for gradcheck, a factory of the model.
Kedge is given the script.

A cell has the checks that fail (in torchtest2 "FAIL", in Kedge "wrong") and, in brackets, those
that only warn. Each kind counts as told if something is said of the faulty script that is not said
of the repaired one.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import trials

HERE = Path(__file__).parent
PEERS = HERE.parent / "build" / "beside-torchtest"
LIBRARIES = ("torchtest2", "neural_net_checklist")
TRAINING = "# training\n"
MOST_STEPS = 1000
"""Steps in which neural_net_checklist is to overfit a batch; it takes 65,536 by itself."""


@dataclass(frozen=True)
class Script:
    """A script, and what has to be said of it to the libraries.

    Attributes:
        text: Its text.
        options: What torchtest2 has to be told.
        is_language: Whether it trains a language model, for which neural_net_checklist has other checks.
    """

    text: str
    options: Mapping[str, Any]
    is_language: bool


@dataclass(frozen=True)
class Said:
    """What is said of a script.

    Attributes:
        failed: The checks that fail.
        warned: Those that only warn.
        lines: What is printed of them.
        seconds: How long it took.
    """

    failed: tuple[str, ...]
    warned: tuple[str, ...]
    lines: tuple[str, ...]
    seconds: float

    @property
    def all(self) -> set[str]:
        """All checks that say something."""
        return {*self.failed, *self.warned}

    def __str__(self) -> str:
        """The checks, those that only warn in brackets."""
        warned = [f"({name})" for name in self.warned]
        return " ".join([*self.failed, *warned]) or "-"


# -- the scripts -------------------------------------------------------------------------------


def scripts(only: str) -> dict[str, tuple[Script, Script]]:
    """Return each kind's repaired script and its faulty one."""
    table = tomllib.loads((HERE / "beside_torchtest.toml").read_text(encoding="utf-8"))
    found = {}
    for kind in table["kinds"]:
        if not fnmatch.fnmatch(kind["name"], only):
            continue
        text = table["start"]["text"] + table[kind["program"]]["text"]
        if TRAINING not in text:
            text += table["training"]["text"]
        options = {name: kind[name] for name in ("frozen", "gradcheck") if name in kind}
        pair = []
        for changes in (kind.get("repaired", ()), kind["change"]):
            changed = text
            for old, new in changes:
                if changed.count(old) != 1:
                    raise ValueError(f"{kind['name']}: not once in the script: {old}")
                changed = changed.replace(old, new)
            pair.append(Script(changed, options, kind["program"] == "language"))
        found[kind["name"]] = (pair[0], pair[1])
    return found


# -- in a process of its own, what a library says -----------------------------------------------


def of_torchtest2(made: Mapping[str, Any], script: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return what torchtest2 says."""
    report = import_module("torchtest2").check_model(
        made["model"],
        made["inputs"],
        made["labels"],
        loss_fn=made["criterion"],
        optimizer=made["optimizer"],
        **script["options"],
    )
    return {
        "failed": [each.name for each in report.failures],
        "warned": [each.name for each in report.warnings],
        "lines": [str(each) for each in (*report.failures, *report.warnings)],
    }


def of_neural_net_checklist(
    made: Mapping[str, Any], script: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Return which of neural_net_checklist's checks fail, each called by itself."""
    checks: Any = import_module("neural_net_checklist.torch_diagnostics")
    batch, build, classes = (made["inputs"], made["labels"]), made["build"], 4
    loss = {"loss_fn": made["criterion"]}
    calls: dict[str, Callable[[], Any]] = {}
    if isinstance(batch[0], dict):
        return {"failed": [], "warned": [], "lines": ["takes models of one input"]}
    if script["is_language"]:
        classes = 20
        hot = made["torch"].nn.functional.one_hot(batch[0], classes).float()
        batch, build = (hot, batch[1]), checks.replace_input_embedding_layer(build, "embed")
        calls["forward_causal"] = lambda: checks.assert_forward_causal_property(build, batch)
        calls["backward_causal"] = lambda: checks.assert_backward_causal_property(build, batch)
    calls |= {
        "loss_at_init": lambda: checks.assert_balanced_classification_cross_entropy_loss_at_init(
            build(), batch, num_classes=classes, **loss
        ),
        "init_calibrated": lambda: (
            checks.assert_balanced_classification_cross_entropy_init_calibrated(
                build(), batch, num_classes=classes
            )
        ),
        "forward_batch": lambda: checks.assert_forward_batch_independence(build, batch),
        "non_zero_gradients": lambda: checks.assert_non_zero_gradients(build(), batch),
        "backward_batch": lambda: checks.assert_backward_batch_independence(build, batch),
        "input_baseline": lambda: checks.assert_input_independent_baseline_worse(
            build, batch, **loss
        ),
        "overfit": lambda: checks.assert_overfit_to_batch(
            build(), batch, threshold=0.1, max_steps=MOST_STEPS, **loss
        ),
    }
    failed, lines = [], []
    for name, call in calls.items():
        made["torch"].manual_seed(0)
        try:
            call()
        except Exception as error:  # noqa: BLE001 - an assertion, or what the model raises in it
            failed.append(name)
            lines.append(f"{name}: {type(error).__name__} {str(error).partition(chr(10))[0]}")
    return {"failed": failed, "warned": [], "lines": lines}


def drive(library: str) -> None:
    """Print as JSON what a library says of the script on stdin."""
    script = json.load(sys.stdin)
    made: dict[str, Any] = {"__name__": "__main__"}
    ask = {"torchtest2": of_torchtest2, "neural_net_checklist": of_neural_net_checklist}[library]
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(script["text"].partition(TRAINING)[0], "train.py", "exec"), made)  # noqa: S102
        said = ask(made, script)
    print(json.dumps(said))


# -- beside each other ---------------------------------------------------------------------------


def said_by(library: str, script: Script) -> Said:
    """Return what a library says of a script, in a process of its own."""
    began = time.perf_counter()
    given = {"text": script.text, "options": script.options, "is_language": script.is_language}
    done = subprocess.run(
        [sys.executable, __file__, "--drive", library],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PEERS), *sys.path])},
        timeout=trials.LIMIT,
    )
    took = time.perf_counter() - began
    if done.returncode:
        return Said(("error",), (), (trials.last_line(done.stderr),), took)
    found = json.loads(done.stdout)
    return Said(tuple(found["failed"]), tuple(found["warned"]), tuple(found["lines"]), took)


def said_by_kedge(script: Script) -> Said:
    """Return what `kedge examine` says of a script."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(script.text, encoding="utf-8")
        done = trials.command("examine", "--json", "train.py", place=Path(folder))
    took = time.perf_counter() - began
    if not done.stdout:
        return Said(("error",), (), (trials.last_line(done.stderr),), took)
    results = json.loads(done.stdout)["results"]
    by_verdict = {
        verdict: [each for each in results if each["verdict"] == verdict]
        for verdict in ("wrong", "look")
    }
    wrong = {each["trial"] for each in by_verdict["wrong"]}
    look = {each["trial"] for each in by_verdict["look"]} - wrong
    lines = [
        f"{each['verdict']} {each['trial']}: {each['came']} {each['where']}"
        for verdict in by_verdict.values()
        for each in verdict
    ]
    return Said(tuple(sorted(wrong)), tuple(sorted(look)), tuple(lines), took)


def install() -> str:
    """Put the libraries into their folder; returns why that cannot be done, "" if it is done."""
    wanted = [
        line
        for line in (HERE / "peers.txt").read_text(encoding="utf-8").splitlines()
        if line.partition("==")[0] in LIBRARIES
    ]
    if all(Path(PEERS, library).is_dir() for library in LIBRARIES):
        return ""
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(PEERS))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *wanted, "tqdm", "pillow"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return trials.last_line(done.stderr)
    return ""


def main() -> int:
    """Print what is said of each kind, and how many each tells."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="*", help="kinds of such names")
    parser.add_argument("--said", action="store_true", help="also print what is said")
    parser.add_argument("--drive", choices=LIBRARIES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        drive(options.drive)
        return 0
    why = install()
    if why:
        print(f"skipped: {' and '.join(LIBRARIES)} cannot be installed: {why}")
        return 0

    judges: dict[str, Callable[[Script], Said]] = {
        "torchtest2": lambda script: said_by("torchtest2", script),
        "neural_net_checklist": lambda script: said_by("neural_net_checklist", script),
        "kedge examine": said_by_kedge,
    }
    told = dict.fromkeys(judges, 0)
    false = dict.fromkeys(judges, 0)
    seconds: dict[str, list[float]] = {name: [] for name in judges}
    print(f"| fault | {' | '.join(judges)} |")
    print(f"|---|{'---|' * len(judges)}")
    kinds = scripts(options.only)
    for name, (repaired, faulty) in kinds.items():
        cells, lines = [], []
        for judge, ask in judges.items():
            of_repaired, of_faulty = ask(repaired), ask(faulty)
            told[judge] += bool(of_faulty.all - of_repaired.all)
            false[judge] += bool(of_repaired.failed)
            seconds[judge] += [of_repaired.seconds, of_faulty.seconds]
            cell = str(of_faulty)
            if of_repaired.all:
                cell += f"; repaired: {of_repaired}"
            cells.append(cell)
            lines += [f"    {judge}: {line}" for line in of_faulty.lines]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        if options.said:
            print("\n".join(lines))
    print(f"| told, of {len(kinds)} | {' | '.join(str(told[name]) for name in judges)} |")
    print(f"| repaired, and failed | {' | '.join(str(false[name]) for name in judges)} |")
    medians = [sorted(seconds[name])[len(seconds[name]) // 2] for name in judges]
    print(f"| seconds, median | {' | '.join(f'{each:.1f}' for each in medians)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
