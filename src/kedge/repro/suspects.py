"""Finds the call that made the first non-finite value, from values seen as the program runs.

# Note [The first one in time]
Values are checked in the order in which the program makes them, so the error began at the first bad
one. If an output is bad, the call itself made it, since all outputs of its children were finite. If
an input is bad, the code of the module around made it, between two of its children. The first bad
gradient was made by the backward of the innermost call that sends it back (see Note [Shares of a
gradient]) and whose own output gradient was finite; or, if there is no such module, of the call
around.

# Note [What is normal]
Masks put -inf into scores on purpose, and loss scaling makes infinite gradients and skips the step.
So an infinity counts against a call only if the optimizer was about to get non-finite gradients;
otherwise the same place is no longer suspect. A NaN in the forward always counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from kedge.repro.calls import RecordedCall
from kedge.repro.finiteness import Bad, Where
from kedge.sites.leaves import own_part
from kedge.torch_internals.module_tables import buffers_in, parameters_in


@dataclass
class SuspectCall:
    """A call that may have made the first bad value.

    Attributes:
        call: The call; None if the value came from outside of all modules.
        direction: "forward" or "backward".
        value: The kind of value that it made.
        site: The site where the value was seen first.
        step: The step.
        why: The reason why the call cannot be kept; empty if it can.
        seen: The value or gradient in which it was seen.
    """

    call: RecordedCall | None
    direction: Literal["forward", "backward"]
    value: Bad
    site: str
    step: int
    why: str = ""
    seen: Tensor | None = None


@dataclass
class FirstBadSearch:
    """The suspects of one step; see Note [The first one in time].

    Attributes:
        keep: Called with a new suspect that can be kept.
        step: Returns the number of the current step.
        forward: The first suspect of the forward for each kind of value.
        backward: The suspect of the backward.
        infinite: The sites with an infinity in this step.
        habitual: The sites with an infinity in a step that went well.
        task: The number of the backward pass of the suspect.
    """

    keep: Callable[[SuspectCall], None]
    step: Callable[[], int]
    forward: dict[str, SuspectCall] = field(default_factory=dict)
    backward: SuspectCall | None = None
    infinite: set[str] = field(default_factory=set)
    habitual: set[str] = field(default_factory=set)
    task: int = -1

    def saw_value(
        self,
        where: Where,
        call: RecordedCall,
        value: Bad,
        seen: Tensor,
    ) -> None:
        """Take a non-finite input or output."""
        site = f"{call.label}:{where}"
        if value == "inf":
            self.infinite.add(site)
        is_normal = value == "inf" and site in self.habitual
        if value in self.forward or "nan" in self.forward or is_normal:
            return
        blamed = call if where == "out" else call.outer
        why = f"the value came from outside of the model, at {site}"
        if blamed is not None:
            why = _spoiled(blamed)
        self._take(SuspectCall(blamed, "forward", value, site, self.step(), why, seen))

    def saw_gradient(
        self,
        where: Where,
        calls: Iterable[RecordedCall],
        value: Bad,
        gradient: Tensor,
        task: int,
    ) -> None:
        """Take a non-finite gradient.

        Args:
            where: The side of the calls.
            calls: The call whose input or output has the gradient; for a parameter all calls that
                used it, the newest first.
            value: The kind of value in it.
            gradient: The gradient.
            task: The number of the backward pass; the first gradient of each pass counts.
        """
        calls = list(calls)
        if not calls or "nan" in self.forward:
            return
        if self.task == task and not self._is_nearer(where, calls[0], gradient):
            return
        self.task = task
        blamed = self._maker(where, calls)
        seen_by = calls[0]
        why = ""
        if blamed is None:
            why = f"the gradient that entered {seen_by.label or 'the model'} was not finite"
        elif blamed in calls:
            seen_by = blamed
        site = f"{seen_by.label}:{where}"
        self._take(SuspectCall(blamed, "backward", value, site, self.step(), why, gradient))

    def choose(self, *, reached: bool) -> SuspectCall | None:
        """Return the suspect to keep, if it matters; see Note [What is normal].

        Args:
            reached: Whether the optimizer was about to get non-finite gradients.
        """
        infinite = self.forward.get("inf")
        nan = self.forward.get("nan")
        if infinite is not None and (reached or nan is not None):
            return infinite
        if nan is None and reached:
            return self.backward
        return nan

    def restart(self, *, sound: bool) -> None:
        """Forget the suspects; sites that were infinite in a sound step are so on purpose."""
        if sound:
            self.habitual |= self.infinite
        self.forward = {}
        self.backward = None
        self.infinite = set()
        self.task = -1

    @property
    def suspects(self) -> list[SuspectCall]:
        """The suspects so far."""
        found = list(self.forward.values())
        if self.backward is not None:
            found.append(self.backward)
        return found

    @property
    def open(self) -> bool:
        """Whether a non-finite value was seen."""
        return bool(self.forward or self.backward or self.infinite)

    def _take(self, suspect: SuspectCall) -> None:
        if suspect.direction == "forward":
            self.forward[suspect.value] = suspect
        else:
            self.backward = suspect
        if not suspect.why:
            self.keep(suspect)

    def _is_nearer(self, where: Where, call: RecordedCall, gradient: Tensor) -> bool:
        """Whether the same gradient, seen again, belongs to a call inside of the known one."""
        known = self.backward
        if known is None:
            return True
        around = known.call is None or known.call in call.outside()
        again = known.seen is gradient and where == "in.grad"
        return again and around and call.gradients.entered_finite

    def _maker(self, where: Where, calls: list[RecordedCall]) -> RecordedCall | None:
        """Return the innermost call that made a gradient out of finite ones; None if there is none."""
        possible = list(calls[0].outside())
        if where != "out.grad":
            possible = [*calls, *possible]
        return next((call for call in possible if call.gradients.entered_finite), None)


def _spoiled(call: RecordedCall) -> str:
    """Describe a parameter or buffer that was non-finite before the call, if there is one."""
    tensors = {**parameters_in(call.module), **buffers_in(call.module)}
    for name, value in tensors.items():
        masks = not isinstance(value, nn.Parameter)
        if value.is_floating_point() and not usable(value, masks=masks):
            path = ".".join(filter(None, (call.label, name)))
            return f"{path} was not finite before the call"
    return ""


def usable(value: Tensor, *, masks: bool) -> bool:
    """Whether a tensor holds no NaN, and no infinity either unless `masks` allows it."""
    value = own_part(value.detach())
    if bool(torch.isfinite(value.sum(dtype=torch.float32)).item()):
        return True
    wrong = value.isnan() if masks else ~value.isfinite()
    return not bool(wrong.any())
