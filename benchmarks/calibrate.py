"""Judge the rules by runs of which it is known whether something is wrong with them.

    python benchmarks/calibrate.py [--seeds N] [--only TEXT] [--verbose] [--keep FOLDER]

Trains a grid of healthy runs, and for every rule runs with one planted fault each, all watched as `kedge run` would.
A rule's recall is the share of the runs with its fault on which it speaks; its precision, the share of the runs on which
it speaks, healthy ones and those with its fault, that have the fault.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from nets import Run, train
from plants import healthy, planted

import kedge
from kedge.rules import ALL, Finding, check
from kedge.store.recording import Recording

EVERY = 2


def watched(run: Run, seed: int, place: Path) -> Recording:
    """Train under watch, unless the recording is there already; a run that diverges is trained to its end all the same."""
    if not place.exists():
        watching = kedge.watch(place, every=EVERY, budget=None)
        watching.tell = lambda text: None
        with watching:
            for _ in train(run, seed):
                pass
    return Recording.open(place)


def main() -> None:
    """Train everything, and print what the rules made of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1, help="how often each run is made")
    parser.add_argument("--only", default="", help="only runs whose rule or name holds this")
    parser.add_argument("--verbose", action="store_true", help="print every finding")
    parser.add_argument(
        "--keep", metavar="FOLDER", help="keep the recordings there, and judge those that are there already"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as passing:
        folder = Path(args.keep or passing)
        folder.mkdir(exist_ok=True)
        runs = {"": healthy(), **planted()}
        found: dict[str, list[tuple[Run, tuple[Finding, ...]]]] = {code: [] for code in runs}
        for code, own in runs.items():
            for run in own:
                for seed in range(args.seeds):
                    if args.only not in f"{code or 'healthy'} {run.name}":
                        continue
                    findings = _judge(code, run, seed, folder, verbose=args.verbose)
                    found[code].append((run, findings))
    _print(found)
    print(f"\n{sum(map(len, found.values()))} runs in {time.perf_counter() - started:.0f} s")


def _judge(code: str, run: Run, seed: int, folder: Path, *, verbose: bool) -> tuple[Finding, ...]:
    began = time.perf_counter()
    title = re.sub(r"[^a-z0-9.]+", "-", f"{code or 'healthy'} {run.name} {seed}".lower())
    findings = check(watched(run, seed, folder / f"{title}.kedge"))
    loud = [finding for finding in findings if finding.severity != "info" or finding.code == code]
    missed = code and not any(finding.code == code for finding in findings)
    if verbose or missed or (not code and loud):
        took = time.perf_counter() - began
        print(f"{'missed ' if missed else ''}{code or 'healthy'}: {run.name}, seed {seed} ({took:.1f} s)", flush=True)
        for finding in findings:
            print(f"    {finding.severity:7} {finding.code:13} {finding.message[:200]}")
    return findings


def _print(found: dict[str, list[tuple[Run, tuple[Finding, ...]]]]) -> None:
    """Print precision and recall of every rule, and the false alarms."""
    calm = found[""]
    print(
        f"\n{'rule':14} {'planted':>7} {'found':>6} {'recall':>7} {'alarms':>7} {'precision':>9}  also spoke on runs planted for"
    )
    for rule in ALL:
        own = found.get(rule.code, [])
        hits = sum(any(f.code == rule.code for f in findings) for _, findings in own)
        alarms = sum(any(f.code == rule.code and f.severity != "info" for f in findings) for _, findings in calm)
        others = Counter(
            code for code, runs in found.items() for _, findings in runs
            if code not in ("", rule.code) and any(f.code == rule.code for f in findings)
        )  # fmt: skip
        also = ", ".join(f"{code} {number}" for code, number in others.most_common())
        recall, precision = _share(hits, len(own)), _share(hits, hits + alarms)
        print(f"{rule.code:14} {len(own):7} {hits:6} {recall:>7} {alarms:7} {precision:>9}  {also}")
    severities = Counter(f.severity for _, findings in calm for f in findings)
    print(f"\n{len(calm)} healthy runs: " + ", ".join(f"{severities[s]} {s}s" for s in ("error", "warning", "info")))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2f}" if whole else "-"


if __name__ == "__main__":
    main()
