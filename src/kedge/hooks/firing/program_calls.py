"""What the program itself calls of a hooked model, which decides how long a recorded value is new.

# Note [The newest pass]
A program calls the model, or parts of it by themselves: an encoder once and then its decoder for
every token, or the two nets of a GAN. A value belongs to the call that the program made, and is
new until that call is over:

* The same is called again: a module that the new call does not reach has no value.
* A part is called again: what was called after that part's last call was of an older round. An
  encoder was called before its decoder, so its value stays. A net whose output the new call
  receives was called for this call, so its value stays, too. If the last call itself was of an
  older round, a new one has begun already.
* A call of the model reaches the part.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable
from types import FrameType

from kedge.sites import leaves
from kedge.torch_internals.module_calls import calls_around

Holder = weakref.ref[Callable[[frozenset[int]], list[tuple[str, int]]]]
"""What returns the path and the pass of each value that is kept in one of these storages."""


class ProgramCall:
    """One call that the program made.

    Attributes:
        pass_: The number of its pass.
        step: Its step.
        differentiated: The newest pass in which what it calls had gradients, -1 before the first.
        ended_by: The newer call that ended its values; None while they are new.
    """

    __slots__ = ("differentiated", "ended_by", "pass_", "step")

    def __init__(self, pass_: int, step: int, before: ProgramCall | None) -> None:
        self.pass_ = pass_
        self.step = step
        self.differentiated = -1
        if before is not None:
            self.differentiated = before.differentiated
        self.ended_by: ProgramCall | None = None


class ProgramCalls:
    """The program's calls of one hooked model and its parts on one thread; see Note [The newest pass].

    Args:
        paths: The paths of the model's modules, by their ids.
        holders: What keeps values of the model.

    Attributes:
        model: The newest call of the model.
        parts: The newest call of each part that the program called by itself, in order.
        callers: The part whose call reached a site last, by the path of the site.
    """

    def __init__(self, paths: dict[int, str], holders: list[Holder]) -> None:
        self._paths = paths
        self._holders = holders
        self.model: ProgramCall | None = None
        self.parts: dict[Hashable, ProgramCall] = {}
        self.callers: dict[str, Hashable] = {}

    def begin_model(self, pass_: int, step: int) -> None:
        """Note that the program calls the model."""
        self.model = ProgramCall(pass_, step, self.model)

    def reached_by_model(self, path: str) -> None:
        """Note that the running call of the model has reached a site, which ends the last call of its part."""
        if path in self.callers:
            self.parts[self.callers.pop(path)].ended_by = self.model

    def reached_by_part(self, path: str, pass_: int, step: int) -> None:
        """Note that a call of a part has reached a site in a pass."""
        calls = list(calls_around(sys._getframe(1)))
        frame = calls[-1] if calls else None  # none in compiled code
        part: Hashable = path
        if frame is not None:
            called = id(frame.f_locals["self"])
            part = self._paths.get(called, called)
        self.callers[path] = part
        before = self.parts.get(part)
        if before is not None and before.pass_ == pass_:
            return
        now = ProgramCall(pass_, step, before)
        if before is not None:
            if before.ended_by is None:
                self._end_later(part, now, frame)
            del self.parts[part]
        self.parts[part] = now

    def _end_later(self, part: Hashable, now: ProgramCall, frame: FrameType | None) -> None:
        """End what was called after a part's last call, except what was called for the new one."""
        order = list(self.parts)
        later = [self.parts[other] for other in order[order.index(part) + 1 :]]
        if not later:
            return
        received: list[ProgramCall] = []
        if frame is not None:
            received = self._made_for(frame)
        for call in later:
            if call.ended_by is None and call not in received:
                call.ended_by = now

    def _made_for(self, frame: FrameType) -> list[ProgramCall]:
        """Return the calls of parts whose values a call receives."""
        try:
            given = leaves.find((frame.f_locals["args"], frame.f_locals["kwargs"]))
        except Exception:  # noqa: BLE001 - of a user's class; the gate complains
            return []
        storages = frozenset(leaves.storage_of(tensor) for _, tensor in given) - {-1}
        made_for = []
        for holder in self._holders:
            held_in = holder()
            if held_in is None:
                continue
            for path, pass_ in held_in(storages):
                call = self.parts.get(self.callers.get(path))
                if call is not None and call.pass_ == pass_:
                    made_for.append(call)
        return made_for

    def end_of(self, path: str, pass_: int) -> ProgramCall | None:
        """Return the call that ended the value of a site in a pass; None if the value is new.

        Args:
            path: The path of the site; a parameter belongs to its module.
            pass_: The number of the pass.
        """
        call = self._part_of(path)
        if call is not None:
            if call.pass_ > pass_:
                return call
            return call.ended_by
        if self.model is not None and self.model.pass_ > pass_:
            return self.model
        around = (
            call
            for name, call in self.parts.items()
            if isinstance(name, str) and f"{path}.".startswith(f"{name}.")
        )
        return next((call for call in around if call.pass_ > pass_), None)

    def differentiate(self, path: str, pass_: int) -> None:
        """Note that a site had a gradient of a pass."""
        call = self._part_of(path) or self.model
        if call is not None and pass_ > call.differentiated:
            call.differentiated = pass_

    def _part_of(self, path: str) -> ProgramCall | None:
        """Return the newest call of the part that reached a site.

        None if a call of the model did.
        """
        part = self.callers.get(path, self.callers.get(path.rpartition(".")[0]))
        if part is None:
            return None
        return self.parts[part]


class FollowedCalls:
    """The program's calls of one hooked model on all threads, as far as an action follows them.

    Attributes:
        paths: The paths of the model's modules, by their ids; None if nothing follows the calls.
        holders: What keeps values of the model.
        by_thread: The calls, by the name of the thread.
    """

    def __init__(self) -> None:
        self.paths: dict[int, str] | None = None
        self.holders: list[Holder] = []
        self.by_thread: dict[str, ProgramCalls] = {}

    def on(self, thread: str) -> ProgramCalls | None:
        """Return the calls on a thread; None if nothing follows them."""
        calls = self.by_thread.get(thread)
        if calls is None and self.paths is not None:
            calls = self.by_thread[thread] = ProgramCalls(self.paths, self.holders)
        return calls
