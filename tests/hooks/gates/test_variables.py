"""A tensor without a name has that of the program's variable."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

import kedge


class Holder:
    """Holds a tensor."""

    def __init__(self) -> None:
        self.w = torch.ones(2, requires_grad=True)


def sites(session: kedge.session) -> list[str]:
    """Return the hooked sites."""
    return [str(entry.site) for entry in session.ledger()]


def test_the_name_is_that_of_the_first_argument() -> None:
    """A variable, an attribute, an item; over several lines, and by keyword."""
    z, holder, hs, named = (torch.ones(2, requires_grad=True), Holder(), [torch.ones(2, requires_grad=True)], {})
    named["a"] = hs[0] * 2
    s = kedge.session()
    s.hook(z, kedge.record())
    s.hook(holder.w, ":acc", kedge.record())
    s.hook(
        hs[0],
        kedge.record(),
    )
    s.hook(named["a"], kedge.record())
    s.hook(z * 2, kedge.record()); s.hook(hs[-1], kedge.record())  # fmt: skip  # noqa: E702
    s.hook({"mine": z}, kedge.record())
    assert sites(s) == [
        "z:grad",
        "holder.w:acc",
        "hs.0:grad",
        "named.a:grad",
        "tensor:grad",
        "tensor:grad",
        "mine:grad",
    ]
    s.end(quiet=True)
    with kedge.hook(z, "z:acc", kedge.record()) as grads:
        z.sum().backward()
    assert torch.equal(grads["z:acc"], torch.ones(2))


def test_without_source_it_is_the_only_global_variable_that_holds_it_or_tensor() -> None:
    """Code at a prompt, or executed from text, has no source."""
    spaces: dict[str, Any] = {"kedge": kedge, "torch": torch}
    exec("z = torch.ones(2, requires_grad=True)\nh = kedge.hook(z, kedge.record())\nz.sum().backward()", spaces)
    assert torch.equal(spaces["h"]["z"], torch.ones(2))
    spaces["h"].remove()
    exec("y = z\nh = kedge.hook(z, kedge.record())\nz.sum().backward()", spaces)
    assert torch.equal(spaces["h"]["tensor"], torch.ones(2))
    spaces["h"].remove()


def watched(value: Tensor, *more: Any) -> Any:
    """Hook a tensor from a function of the program."""
    return kedge.hook(value, *more)


def test_the_name_is_that_at_the_call_of_kedge_and_no_frame_is_kept() -> None:
    """A function between has its own variables; its tensors go when the program lets them go."""
    hooked = watched(z := torch.ones(2, requires_grad=True), kedge.zero())
    assert sites(hooked) == ["value:grad"]
    hooked.session.end(quiet=True)
    ref = weakref.ref(z)
    del z, hooked
    assert ref() is None
