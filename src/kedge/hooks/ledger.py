"""What fired, in which order - and what did not, and why.

PyTorch's hooks are silent when they do not fire. The ledger never is: each site has either
fired or has a cause, with what to do about it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from kedge.flow import Event
from kedge.sites.site import Site

if TYPE_CHECKING:
    from kedge.hooks.tap import Tap

_SHOWN = 12


class Cause(NamedTuple):
    """Why a site did not fire, and what to do."""

    why: str
    remedy: str


@dataclass(frozen=True)
class Entry:
    """One line of the ledger.

    Attributes:
        site: The site, as it was asked for.
        fired: How often its actions ran.
        cause: Why they never did; None if they did.
    """

    site: Site
    fired: int
    cause: Cause | None

    def __str__(self) -> str:
        """The line."""
        if self.cause is None:
            return f"{self.site}  fired {self.fired} times"
        return f"{self.site}  never fired: {self.cause.why} ({self.cause.remedy})"


class Ledger:
    """Of each site of a session: how often it fired, or why not."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(entries)

    @classmethod
    def of(cls, taps: Iterable[Tap]) -> Ledger:
        """Draw up the ledger of some taps, one entry a site."""
        by_site: dict[tuple[int, Site], list[Tap]] = {}
        for tap in taps:
            by_site.setdefault((tap.gate.whose, tap.site), []).append(tap)
        entries = []
        for (_, site), group in by_site.items():
            fired = max(t.fired for t in group)
            entries.append(Entry(site, fired, None if fired else explain(group[0])))
        return cls(entries)

    def __iter__(self) -> Iterator[Entry]:
        """The entries, in the order in which the sites were hooked."""
        return iter(self.entries)

    def __len__(self) -> int:
        """How many sites."""
        return len(self.entries)

    def __getitem__(self, site: str) -> Entry:
        """The entry of a site, by its text; ``:out`` may be left out."""
        for entry in self.entries:
            if str(entry.site) in (site, f"{site}:out"):
                return entry
        raise KeyError(
            f'the ledger has no site "{site}"; it has {", ".join(str(e.site) for e in self.entries[:_SHOWN])}'
        )

    def __str__(self) -> str:
        """A table: site, times fired, and the cause where that is none."""
        if not self.entries:
            return "no site was hooked"
        width = max(len(str(e.site)) for e in self.entries)
        lines = []
        for e in self.entries:
            what = f"fired {e.fired} times" if e.cause is None else f"never fired: {e.cause.why}"
            lines.append(f"{e.site!s:{width}}  {what}")
        return "\n".join(lines)

    def silent(self) -> str:
        """The sites that never fired, grouped by cause, as a message; empty if all did."""
        groups: dict[Cause, list[str]] = {}
        for e in self.entries:
            if e.cause is not None:
                groups.setdefault(e.cause, []).append(str(e.site))
        if not groups:
            return ""
        count = sum(map(len, groups.values()))
        lines = [f"{count} of {len(self.entries)} hooked sites never fired"]
        for cause, sites in groups.items():
            more = f" and {len(sites) - _SHOWN} more" if len(sites) > _SHOWN else ""
            lines.append(f"  {', '.join(sites[:_SHOWN])}{more}: {cause.why}; {cause.remedy}")
        return "\n".join(lines)

    def why(self, name: str) -> str:
        """Say why nothing was recorded under a name, as far as the ledger knows."""
        path = name.partition(":")[0].partition("#")[0]
        causes = [str(e) for e in self.entries if e.cause is not None and e.site.path == path]
        if causes:
            return "; ".join(causes)
        return f"the sites hooked here are {', '.join(str(e.site) for e in self.entries[:_SHOWN]) or 'none'}"


class Timeline:
    """The firings of a session in the order in which they happened."""

    def __init__(self, entries: tuple[tuple[Event, str], ...]) -> None:
        self.entries = entries

    def __iter__(self) -> Iterator[tuple[Event, str]]:
        """Each event with the name of the action that ran."""
        return iter(self.entries)

    def __len__(self) -> int:
        """How many firings are kept: the last 10,000."""
        return len(self.entries)

    @property
    def sites(self) -> list[str]:
        """The sites alone, as text."""
        return [str(event.site) for event, _ in self.entries]

    def __str__(self) -> str:
        """One line a firing: which pass or backward, which call, which site, which action."""
        lines = []
        for event, label in self.entries:
            when = f"backward {event.backward}" if event.backward >= 0 else f"pass {event.pass_}"
            again = "  recompute" if event.recompute else ""
            lines.append(f"step {event.step}  {when:12}  call {event.call}  {event.site}  {label}{again}")
        return "\n".join(lines)


def explain(tap: Tap) -> Cause:
    """Find out why a tap never fired."""
    clock = tap.session.clock
    if tap.when is not None and not any(tap.when(step) for step in range(clock.step + 1)):
        return Cause(f"its schedule did not come up in steps 0 to {clock.step}", "let it begin earlier, or run longer")
    if tap.failed:
        return Cause("its action was switched off", "see the warning that was given when it failed")
    if hasattr(tap.gate, "called"):
        return _explain_gate(tap)
    param = getattr(tap.gate, "param", None)
    if param is not None and not param.requires_grad:
        return Cause("it requires no grad, or did not when it was hooked", "call requires_grad_() before hooking")
    return _explain_backward(tap)


def _explain_backward(tap: Tap) -> Cause:
    if tap.session.clock.backwards == 0:
        return Cause(
            "no backward reached a hook of this session", "call backward() inside the block, on what depends on it"
        )
    return Cause("the backward that ran did not reach it", "what was differentiated does not depend on it")


def _explain_gate(tap: Tap) -> Cause:
    if not tap.gate.called:
        return _explain_uncalled(tap)
    return _explain_value(tap) or (_explain_gradient(tap) if tap.site.is_gradient else _explain_skipped(tap))


def _explain_value(tap: Tap) -> Cause | None:
    """Look for the cause in what the module took or returned."""
    gate, site = tap.gate, tap.site
    if gate.recalled == gate.called:
        return Cause(
            "it ran only in a checkpoint's recompute", "observers skip those; ask with record(recomputes=True)"
        )
    if gate.empty is not None and not gate.leaves:
        return Cause(f"there is no tensor to see: {gate.empty}", "hook the module inside that makes the tensor")
    if site.leaf is not None and site.leaf not in gate.leaves:
        has = ", ".join(f"[{leaf}]" if leaf else "a bare tensor" for leaf in gate.leaves)
        return Cause(f"its value has no leaf [{site.leaf}]", f"it has {has}")
    return None


def _explain_gradient(tap: Tap) -> Cause:
    gate, kind = tap.gate, tap.site.kind
    if kind == "in.share" and gate.share_cause:
        return Cause(gate.share_cause, "hook :in.grad for the total")
    if kind in ("out.grad", "in.grad") and not gate.listened:
        return Cause("its value requires no grad", "the forward ran without grad, or nothing before it is trainable")
    return _explain_backward(tap)


def _explain_skipped(tap: Tap) -> Cause:
    if tap.site.call is not None:
        return Cause(f"no forward called it {tap.site.call + 1} times", "calls are counted from 0")
    return Cause("its action was switched off", "see the warning that was given when it failed")


def _explain_uncalled(tap: Tap) -> Cause:
    path = tap.gate.path
    model = next(t.model() for t in tap.session.targets.values() if t.passes is tap.gate.passes)
    if model is None:
        return Cause("never called while the hook was there", "the model is gone, so it cannot be looked at any more")
    parent_path, _, name = path.rpartition(".")
    try:
        parent = model.get_submodule(parent_path)
    except AttributeError:
        return Cause("it is no longer part of the model", "hook again after the model has changed")
    if name == "out_proj" and isinstance(parent, nn.MultiheadAttention):
        return Cause(
            "bypassed by a fused path: attention uses its weights without calling it", f'hook "{parent_path}" instead'
        )
    others = {
        t.gate.path for t in tap.session.taps if getattr(t.gate, "called", 0) and t.gate.passes is tap.gate.passes
    }
    if not others and not tap.session.clock.passes:
        return Cause("the model was not called", "call it inside the block")
    inside = path + "." if path else ""
    if any(o != path and o.startswith(inside) for o in others) or (name and calls_forward(parent, name)):
        return Cause("its .forward() was called directly, which fires no hook", "call the module itself: layer(x)")
    return Cause("never called while the hook was there", "this forward takes another way, or calls it as .forward()")


def calls_forward(parent: nn.Module, name: str) -> bool:
    """Tell whether the source of a module's forward calls ``self.<name>.forward(...)``."""
    try:
        tree: Any = ast.parse(textwrap.dedent(inspect.getsource(type(parent).forward)))
    except (OSError, TypeError, SyntaxError):  # no source to read: built in, or typed at a prompt
        return False
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    found = (f.value for f in calls if isinstance(f, ast.Attribute) and f.attr == "forward")
    return any(isinstance(v, ast.Attribute) and v.attr == name for v in found)
