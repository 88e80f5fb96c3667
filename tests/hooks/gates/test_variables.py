"""A tensor without a name has that of the program's variable."""

from __future__ import annotations

import contextvars
import functools
import weakref
from pathlib import Path
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
    z, holder, hs, named = (
        torch.ones(2, requires_grad=True),
        Holder(),
        [torch.ones(2, requires_grad=True)],
        {},
    )
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
    exec(
        "z = torch.ones(2, requires_grad=True)\nh = kedge.hook(z, kedge.record())\nz.sum().backward()",
        spaces,
    )
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


def test_a_call_of_another_function_that_calls_kedge_gives_no_name() -> None:
    """Its arguments are its own: the first is not the tensor, or only by chance."""
    s, record, selector = kedge.session(), kedge.record(), ":grad"
    z = torch.ones(2, requires_grad=True)
    functools.partial(s.hook, z)(selector, record)
    functools.partial(s.hook, z)(record)
    contextvars.copy_context().run(s.hook, z, record)
    given = [z, record]
    s.hook(*given)
    s.hook(z, record, when=kedge.every(2))
    assert sites(s) == ["tensor:grad"] * 4 + ["z:grad"]
    s.end(quiet=True)
    made = kedge.session().hook(z, record)
    assert sites(made) == ["z:grad"]
    made.session.end(quiet=True)
    assert kedge.audit(names={}, target=z).model == "z"


def test_a_file_that_has_changed_since_it_was_loaded_gives_no_wrong_name(tmp_path: Path) -> None:
    """The names of the text are compared with those that the running code loads."""
    file = tmp_path / "program.py"
    text = (
        "def watch(s, one, two, *actions):\n    s.hook(one, *actions)\n    s.hook(two, *actions)\n"
    )
    spaces: dict[str, Any] = {}
    file.write_text(text)
    exec(compile(text, str(file), "exec"), spaces)
    leaves = [torch.ones(2, requires_grad=True) for _ in range(2)]
    file.write_text(text.replace("s.hook(one", "s.hook(two"))
    s = kedge.session()
    spaces["watch"](s, *leaves, kedge.record())
    assert sites(s) == ["tensor:grad", "two:grad"]
    s.end(quiet=True)
