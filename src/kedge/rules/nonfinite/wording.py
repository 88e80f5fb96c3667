"""The words for a birth: what was seen, on what it rests, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kedge.rules.command import again, with_dump_on
from kedge.rules.naming import NAMED, name_of, plain
from kedge.rules.nonfinite import phrases
from kedge.rules.nonfinite.advice import Maker, operation
from kedge.rules.nonfinite.bad_steps import ABSENT, NAN, Moment, has_nan, usable
from kedge.rules.nonfinite.births import BACKWARD, Birth
from kedge.rules.nonfinite.leadup import lead_up
from kedge.rules.nonfinite.step_size import GROWN, SMALL, rms_at, strides
from kedge.rules.wiring import Module, Wiring
from kedge.store.recording import Recording, Rows, SiteInfo
from kedge.store.rows import FULL

#: How many of the sites that passed a value on the evidence names.
PROPAGATORS = 12


@dataclass(frozen=True)
class Telling:
    """A birth with all that is needed to speak of it."""

    recording: Recording
    wiring: Wiring
    moment: Moment
    birth: Birth

    def message(self) -> str:
        """Say in one sentence what was born where, and where the program calls it."""
        said = self._form().format(
            site=self.wiring.text(self.birth.site),
            value=self.value(),
            step=self.moment.step,
            before=self.moment.sane,
            near=self._list(self.birth.near),
            name=self._name(),
            parts=self._parts(),
            operation=self._operation(),
            others=self._others(),
            takers=", ".join(map(name_of, self.birth.also)),
            unseen=", ".join(name_of(module) for module in self._unseen()[:NAMED]),
        )
        source = self._source()
        if source is not None and self.birth.how == "made":
            inside = f", in {source['function']}" if source.get("function") else ""
            called = phrases.BACKWARD_CALLED.format(file=source["file"], line=source["line"], inside=inside)
            return f"{said} {called}{': `' + source['text'] + '`' if source.get('text') else ''}."
        if source is None or self.birth.how in ("loss", "parameter", "stepped", "unseen", "update"):
            return said
        called = name_of(self.birth.also[0]) if self.birth.how == "beside" else self._name()
        where = phrases.CALLED[self.birth.how in phrases.BETWEEN].format(name=called, **source)
        return f"{said} {where}{': `' + source['text'] + '`' if source.get('text') else ''}."

    def remedy(self) -> str:
        """Say what to do about it."""
        how = self.birth.how
        if how == "update":
            return phrases.UPDATED.format(figures=self._step_figures())
        if how != "written" and (grown := self.growth()) and how not in ("entry", *BACKWARD):
            return phrases.GROWN.format(**grown)
        if how not in ("written", *BACKWARD) and self._largest() > self._huge():
            form = phrases.LARGE_FROM_THE_START if self._first else phrases.DIVERGED
            return form.format(largest=self._largest())
        if how in ("module", "own", "between"):
            return self._maker().advice()
        if how == "gap" and not self.birth.near:
            how = "loss"
        if how in BACKWARD:
            own = self._maker().backward_advice() if how == "backward" else ""
            return (phrases.SCALED if self._dtype() == "float16" else "") + (own or self._advised(how))
        before = strides(self.recording, self.moment.step) if how == "unseen" else ""
        return before + self._advised(how)

    @property
    def _first(self) -> bool:
        """Whether it was so in the first step, before any training."""
        return self.moment.step == 0

    def _advised(self, how: str) -> str:
        """Give the remedy of one way, with the options that would show more, of those that were not in use."""
        command = with_dump_on(self.recording)
        return phrases.REMEDIES[how].format(
            name=self._name(),
            again=again(self.recording, "To have the module named"),
            dumped=f" To have the operation named: `{command}`." if command else "",
            before="" if self._first else "; if the parameter was finite before, lower the learning rate",
        )

    def evidence(self) -> dict[str, Any]:
        """Give the figures of the site and of its neighbours, what became of the value, and how it came to it."""
        row, module = self._row(), self.birth.module
        healed = [m for m in self.wiring if self.moment.bad(m.ins) and self.moment.finite(m.outs)]
        bad = self.moment.bad(range(len(self.wiring.sites)))
        others = sorted((site for site in bad if site != self.birth.site), key=self._flow)
        return {
            "how": self.birth.how,
            "module": module.path if module else None,
            "type": module.type if module else None,
            "also": [other.path for other in self.birth.also],
            "source": self._source(),
            "node": self.wiring.sites[self.birth.site].node,
            "value": self._kind(),
            "nonfinite": row["nonfinite"],
            "count": row["count"],
            "near": {self.wiring.text(site): self._figures(site) for site in self.birth.near[:NAMED]},
            "growth": self.growth(),
            "propagated": len(others),
            "propagators": [self.wiring.text(site) for site in others[:PROPAGATORS]],
            "healed": [self.wiring.text(m.outs[0]) for m in healed[:NAMED]],
            "before": lead_up(self.recording, self.wiring, self.moment, self.birth),
        }

    def _source(self) -> dict[str, Any] | None:
        """Find the program's line that calls the module; of an operation between two modules, that of the next one."""
        module = self.birth.also[0] if self.birth.how == "beside" else self.birth.module
        own = (*module.outs, *module.ins) if module is not None and self.birth.how not in phrases.BETWEEN else ()
        found = (self.wiring.sites[site].source for site in (*own, self.birth.site))
        return next((dict(source) for source in found if source), None)

    def _flow(self, site: int) -> tuple[bool, int]:
        """Order sites as values flow: forward before backward, and in it as they first fired."""
        return self.wiring.sites[site].kind not in ("in", "out"), site

    def _operation(self) -> str:
        """Name the last operation on the value, where it is the module's own."""
        name = operation(self._node())
        return f" ({name} was its last)" if name else ""

    def _node(self) -> str | None:
        """Give the node of what was made; None where the one that is known belongs to what another module made."""
        site, module = self.wiring.sites[self.birth.site], self.birth.module
        if self.birth.how == "between":
            return None if site.kind.startswith("out") else site.node
        if module is None or self.moment.full:
            return site.node
        # The node was noted in a full step, in which the module may have returned what it got, or what one inside it did.
        given = {self.wiring.sites[source].node for source in module.sources if source is not None}
        return None if site.node in given or self.wiring.returned(module) is not None else site.node

    def _unseen(self) -> list[Module]:
        """List the modules inside the one of the birth of whose output nothing was seen, as off schedule."""
        if self.birth.how != "own" or self.birth.module is None or self.moment.full:
            return []
        states, worked = self.moment.states, self.moment.worked
        inner = [m for m in self.wiring.inside(self.birth.module) if m.outs]
        return [m for m in inner if all(states[site] == ABSENT or site in worked for site in m.outs)]

    def _maker(self) -> Maker:
        module = self.birth.module
        kind = module.type if module is not None and self.birth.how in ("module", "backward") else ""
        node = None if self.birth.how == "backward" else self._node()
        if masked := [m.type for m in self._unseen() if not self.moment.excused.isdisjoint(m.ins)]:
            kind, node = masked[0], None
        return Maker(self._where(), kind, node, self._dtype(), self._largest(), self._first)

    def _dtype(self) -> str:
        """Give the dtype in which it was made: of a module's backward that of its output, which autocast chooses."""
        module = self.birth.module
        site = module.outs[0] if module is not None and self.birth.how in BACKWARD and module.outs else self.birth.site
        return self.wiring.sites[site].dtype

    def _step_figures(self) -> str:
        """Say how large an update was, beside the parameter and its gradient."""
        path = self.wiring.sites[self.birth.site].path
        sizes = []
        for kind, words in (("param", "its rms was"), ("param.grad", "its gradient's")):
            rows = next((self.recording.rows(s) for s in self.recording.of_kind(kind) if s.path == path), None)
            size = _figure(rows, self.moment.step) if rows is not None else None
            sizes += [f"{words} {size:.2g}"] if size is not None else []
        return f" ({', '.join(sizes)})" if sizes else ""

    def _where(self) -> str:
        """Name the place of an operation for its remedy."""
        name = self._name()
        if self.birth.how in ("module", "backward"):
            return name
        return f"the forward of {name}{', after its modules' if self.birth.how == 'own' and not self._unseen() else ''}"

    def growth(self) -> dict[str, Any] | None:
        """Find the parameter of the same root that had grown most, if any had grown far."""
        root = self.wiring.sites[self.birth.site].root
        grown = [g for s in self.recording.of_kind("param") if s.root == root and (g := self._grown(s))]
        return max(grown, key=lambda each: each["ratio"] or np.inf, default=None)

    def _grown(self, site: SiteInfo) -> dict[str, Any] | None:
        """Compare a parameter's size with its first; squares beyond float32 count as infinitely large."""
        rows = self.recording.rows(site)
        until = np.flatnonzero((rows.step <= self.moment.step) & usable(rows))
        size = rows.statistic("rms")[until]
        if len(size) < 2 or not SMALL < size[0] < np.inf or not size[-1] > GROWN * size[0]:
            return None
        return {
            "site": site.site,
            "first": int(rows.step[until[0]]),
            "was": plain(size[0]),
            "step": int(rows.step[until[-1]]),
            "now": plain(size[-1]),
            "ratio": plain(size[-1] / size[0]),
            "words": f"{size[-1]:.2g}" if np.isfinite(size[-1]) else "more than 1e19",
        }

    def _is_vast(self, site: int) -> bool:
        """Tell whether the squares of a parameter left float32: it is very large, or holds infinities."""
        rows = self.recording.rows(self.wiring.sites[site])
        return bool(len(rows) and np.isinf(rows.sumsq[_latest(rows, self.moment.step)]))

    def _largest(self) -> float:
        """Give the largest value next to the birth."""
        figures = [self._figures(site) for site in self.birth.near]
        return max((abs(f[name]) for f in figures for name in ("min", "max", "rms", "now") if name in f), default=0.0)

    def _huge(self) -> float:
        """Give the size from which a product of two values is in danger of overflow."""
        return np.inf if self.wiring.sites[self.birth.site].dtype == "float16" else 1e15

    def _figures(self, site: int) -> dict[str, Any]:
        """Give the range of a site's values when they were last measured in full, and their rms in this very step."""
        rows = self.recording.rows(self.wiring.sites[site])
        full = np.flatnonzero((rows.level == FULL) & (rows.step <= self.moment.step))
        row = _row(rows, int(full[-1])) if len(full) else {}
        figures = {name: row[name] for name in ("step", "min", "max", "rms") if row.get(name) is not None}
        now = _figure(rows, self.moment.step) if figures.get("step") != self.moment.step else None
        return figures | ({} if now is None else {"now": plain(now)})

    def _row(self) -> dict[str, Any]:
        rows = self.recording.rows(self.wiring.sites[self.birth.site])
        return _row(rows, _latest(rows, self.moment.step))

    def _kind(self) -> str:
        """Say what kind of value the site held."""
        rows = self.recording.rows(self.wiring.sites[self.birth.site])
        at = _latest(rows, self.moment.step)
        if self.moment.states[self.birth.site] == NAN or has_nan(rows)[at]:
            return "NaN"
        below = rows.min[at] == -np.inf or rows.sum[at] == -np.inf
        above = rows.max[at] == np.inf or rows.sum[at] == np.inf
        if not below and not above:
            return "infinities" if rows.nonfinite[at] > 0 else "an infinite norm"
        return "inf and -inf" if below and above else "-inf" if below else "inf"

    def value(self) -> str:
        """Say what the site held, and in how many elements."""
        row = self._row()
        return self._kind() + (f" ({row['nonfinite']} of {row['count']} elements)" if row["nonfinite"] else "")

    def _form(self) -> str:
        """Choose the sentence."""
        how, near = self.birth.how, self.birth.near
        if how == "made" and self.birth.sure < 0.8:
            return phrases.MADE_UNSEEN
        if how == "gap" and not near:
            return phrases.GAP_AT_THE_LOSS
        if how == "gap" and not self.moment.full:
            return phrases.MESSAGES["gap"][:-1] + phrases.OR_WRITTEN
        if self._unseen():
            return phrases.OWN_OR_UNSEEN
        if how == "between" and not near:
            return phrases.BETWEEN_AT_THE_START
        return phrases.MESSAGES[how]

    def _list(self, sites: Iterable[int]) -> str:
        texts = [self.wiring.text(site) for site in sites]
        rest = f" and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
        return ", ".join(texts[:NAMED]) + rest

    def _name(self) -> str:
        """Name the module that made it, or that holds the operation that did."""
        return name_of(self.birth.module) if self.birth.module is not None else "the program"

    def _others(self) -> str:
        """Name who else takes the value whose gradient it is: other modules, and operations of containers' own forwards."""
        own = self.wiring.modules.get(self.wiring.sites[self.birth.site].owner)
        around = {m.path for inner in (own, self.birth.module) if inner for m in self.wiring.ancestors(inner)}
        parts = [f"that of {name_of(m)}, which takes the same value" for m in self.birth.also if m.path not in around]
        holders = [f"in {name_of(m)}'s own forward" for m in self.birth.also if m.path in around]
        if holders or not parts:
            place = " and ".join(holders) or "outside any watched module"
            parts.append(f"that of an operation {place} that takes the same value")
        return ", or ".join(parts)

    def _parts(self) -> str:
        """Name what of a module was finite."""
        module = self.birth.module
        if module is None:
            return ""
        inputs = len(module.ins) or len(module.sources)
        given, verb = ("inputs", "were") if inputs > 1 else ("input", "was")
        params = [site for m in (module, *self.wiring.inside(module)) for site in m.params]
        held = bool(params)
        if self.birth.sure < 0.8:
            return f"{given} and parameters were finite, as far as they were watched"
        if vast := [site for site in params if self._is_vast(site)]:
            return f"{given} {verb} finite, and {self._list(vast)} {'were' if len(vast) > 1 else 'was'} beyond 1e19 or infinite"
        if self.birth.stale:
            return f"{given} {verb} finite, and so were its parameters when they were last seen"
        if held:
            return f"{given} and parameters were finite"
        return f"{given} {verb} finite"


def _latest(rows: Rows, step: int) -> int:
    """Find the row of a step, or the last one before it."""
    return max(int(np.searchsorted(rows.step, step, side="right")) - 1, 0)


def _row(rows: Rows, at: int) -> dict[str, Any]:
    """Give the figures of one row that were measured, as plain JSON values."""
    numbers: dict[str, Any] = {name: plain(rows.statistic(name)[at]) for name in ("min", "max", "rms")}
    nonfinite = int(rows.nonfinite[at])
    known = {"nonfinite": None if nonfinite < 0 else nonfinite, "count": int(rows.count[at])}
    return {"step": int(rows.step[at]), **numbers, **known}


def _figure(rows: Rows, step: int) -> float | None:
    """Give the rms of a row of one step, if it is finite."""
    size = rms_at(rows, step)
    return size if np.isfinite(size) else None
