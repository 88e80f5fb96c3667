"""Makes watchers and recordings, for a command and for a block of code alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from kedge.actions.measure.meter import Meter
from kedge.repro.first_bad_call import FirstBadCall
from kedge.repro.rerun import operations_of
from kedge.rules.project_config import configured_rules
from kedge.store.events import JoinedEvent
from kedge.store.writing.folder import RecordingWriter, create, join
from kedge.torch_internals import accelerators
from kedge.watch.acting.acting import Acting
from kedge.watch.kept.step_keeper import MOST_BAD, StepKeeper
from kedge.watch.records.writer import StepSink
from kedge.watch.run.options import WatchOptions
from kedge.watch.run.ranks import LaunchedRank, places
from kedge.watch.watcher import Watcher


def make_watch(
    log: StepSink,
    options: WatchOptions,
    place: Callable[[], Path | None] | None = None,
    rank: int | None = None,
) -> Watcher:
    """Return a watcher for all models of this process; it does not watch yet.

    Args:
        log: Receives the records.
        options: The options of the watch.
        place: Returns the recording, whose folder also receives the repro of ``--dump``, or None as
            long as there is none; without it, no repro is made, and nothing is done at findings.
        rank: The rank of this process; that which its launcher tells if None.
    """
    watch = Watcher(Meter(), log, sites=options.sites, n=options.every, budget=options.budget)
    record = watch.record
    if options.dump and place is not None:
        record.dump = FirstBadCall(place, log, watch.step, rerun=operations_of)
    if not options.rerun:
        record.steps_again.refuse()
    _keep_steps(record.kept, options.keep_steps, place)
    if options.time:
        watch.kinds.time_modules()
    if options.saved is not None:
        first_step = record.first_step
        first_step.step_account = options.saved(first_step.shield)
    if rank is None:
        rank = LaunchedRank.here().rank
    if options.on and place is not None:
        watch.acting = Acting(
            options.on,
            configured_rules(),
            record,
            watch.shield,
            watch.updates,
            place,
            rank,
            options.budget,
        )
    return watch


def _keep_steps(
    kept: StepKeeper, last: int | None, place: Callable[[], Path | None] | None
) -> None:
    """Keep the last steps of the run, or bad ones; none in a program of several ranks, which run together."""
    if place is None or last == 0 or LaunchedRank.here().world > 1:
        return
    kept.place = place
    kept.bad = MOST_BAD
    kept.last = last or 0


def begin_recording(
    place: Path, manifest: Mapping[str, Any], force: bool
) -> RecordingWriter | None:
    """Make a recording, or join the one that rank 0 makes.

    Its manifest also names the device and torch's version.

    Returns:
        The writer; None as long as rank 0 has not made the recording.
    """
    described: dict[str, Any] = {**manifest, **_surroundings()}
    if not manifest.get("rank"):
        return create(place, described, force=force)
    for candidate in takewhile(Path.exists, places(place)):
        writer = join(candidate, described)
        if writer is not None:
            writer.event(JoinedEvent(**{name: described.get(name) for name in _OWN}))
            return writer
    return None


_OWN = ("started", "pid", "host", "device")
"""The entries of the manifest that differ from rank to rank."""


def _surroundings() -> dict[str, str]:
    """Return torch's version and the name of the device in use."""
    return {"torch": torch.__version__, "device": accelerators.name()}
