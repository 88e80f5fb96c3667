"""Rows about compiled and scripted code."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

import kedge
from capable import programs
from capable.row import Lacking, check, close, row, same

BACKEND = "inductor"
"""What the first of these rows is compiled with."""


@row(14, "a hook attached before torch.compile, with fullgraph=True, forward and backward")
def before_compiling() -> str:
    """The edited output and the edited gradient beside those of the uncompiled model."""
    torch._dynamo.reset()
    model, x = programs.layers()

    def ran(call: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        given = x.clone().requires_grad_()
        value = call(given)
        value.sum().backward()
        assert given.grad is not None  # noqa: S101 - it requires a gradient
        return acts["0"], value.detach(), given.grad

    with kedge.session() as s:
        acts = s.hook(model, "0", kedge.record())
        s.hook(model, "1", kedge.scale(2))
        s.hook(model, "0:out.grad", kedge.clamp(max=0.1))
        eager = ran(model)
        compiled = ran(torch.compile(model, fullgraph=True, backend=BACKEND))
    for name, found, plain in zip(("record", "output", "gradient"), compiled, eager, strict=True):
        close(found, plain, f"the {name}")
    hidden = model[1](model[0](x)) * 2
    close(eager[1], model[2](hidden), "the uncompiled output")
    return f"backend {BACKEND}"


class Counting:
    """A backend of `torch.compile` that counts what it compiles and runs it as it is."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.compiled += 1
        return graph.forward


@row(15, "a hook attached to code that is compiled already")
def after_compiling() -> str:
    """It fires and edits; a warning says that the code is compiled again."""
    torch._dynamo.reset()
    model, x = programs.layers()
    compiled = torch.compile(model, backend=Counting())
    compiled(x)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with kedge.hook(model, "1", kedge.zero()):
            found = compiled(x)
    close(found, model[2].bias.expand(5, 3), "the edited output")
    close(compiled(x), model(x), "the output after the block")
    check(bool(warned), "no warning")
    return "compiles again, with a warning"


@row(16, "a hook on another, eager model leaves compiled code alone")
def another_model() -> None:
    """Nothing is compiled again while the other is hooked, nor afterwards."""
    torch._dynamo.reset()
    model, x = programs.layers()
    other, _ = programs.made(programs.Block)
    backend = Counting()
    compiled = torch.compile(model, backend=backend)
    plain = compiled(x)
    for _ in range(3):
        with kedge.hook(other, "**:out", kedge.record()) as acts:
            other(torch.randn(5, 4))
            same(compiled(x), plain, "the output")
        check("up" in acts, "the hook on the other model did not fire")
    compiled(x)
    check(backend.compiled == 1, f"compiled {backend.compiled} times")


@row(42, "scripted models: what can be hooked is, and what cannot says so")
def scripted() -> str:
    """The whole traced model, a parameter of the scripted one, and two refusals by name."""
    model, x = programs.layers()
    plain = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        traced, script = torch.jit.trace(model, x), torch.jit.script(model)
    with kedge.hook(traced, ":out", kedge.record()) as acts:
        traced(x)
    close(acts[":out"], plain, "the output of the traced model")
    with kedge.hook(script, "0.weight:param.grad", kedge.record()) as acts:
        script(x).sum().backward()
    same(
        acts["0.weight:param.grad"],
        dict(script.named_parameters())["0.weight"].grad,
        "the gradient",
    )
    for each in (traced, script):
        said = refusal(each, x, "1")
    return f"refused by name: “{said}”"


def refusal(model: nn.Module, x: Tensor, selector: str) -> str:
    """Return what a hook that cannot fire says, once it is attached and the model has run."""
    try:
        with kedge.hook(model, selector, kedge.record()):
            model(x)
    except kedge.errors.NoSuchKind as error:
        message = str(error)
        check("TorchScript" in message, f"the message is: {message}")
        return message
    raise Lacking(f"a hook on {selector} never fires, and nothing says so")
