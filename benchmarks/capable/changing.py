"""Rows about changing what a model computes, and about explaining it."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812 - the field's name for it
from torch.utils.flop_counter import FlopCounterMode

import kedge
from capable import programs
from capable.row import Partly, check, close, row, same
from kedge import recipes


@row(9, "a block's output of one run put into another, in a GPT-2 made from its configuration")
def patched() -> None:
    """Beside the same by two hooks of PyTorch."""
    model, clean = programs.gpt()
    other = clean.clone()
    other[0, 2] = 7
    with torch.no_grad():
        with kedge.hook(model, "transformer.h.0", kedge.record()) as acts:
            model(clean)
        with kedge.hook(model, "transformer.h.0", kedge.replace(acts["transformer.h.0"])):
            found = model(other).logits
        plain = by_hand(model, clean, other)
    same(found, plain, "the patched run")


def by_hand(model: nn.Module, clean: Tensor, other: Tensor) -> Tensor:
    """Put the first block's output of one input into the run of another, with PyTorch alone."""
    block = model.get_submodule("transformer.h.0")
    kept = plain_output(model, "transformer.h.0", clean)
    handle = block.register_forward_hook(lambda module, args, value: kept)
    logits: Tensor = model(other).logits
    handle.remove()
    return logits


@row(10, "a table of such effects, by site and position")
def patching() -> None:
    """One cell beside the run that it stands for."""
    model, clean = programs.gpt()
    other = clean.clone()
    other[0, 2] = 7

    def score(result: object) -> Tensor:
        logits: Tensor = result.logits
        return logits[0, -1, 3] - logits[0, -1, 4]

    table = recipes.patch(model, clean, other, "transformer.h.*", score, along=1)
    check(tuple(table.effects.shape) == (2, 6), f"effects of shape {tuple(table.effects.shape)}")
    with torch.no_grad():
        with kedge.hook(model, "transformer.h.0", kedge.record()) as acts:
            clean_score = score(model(clean))

        def put(value: Tensor) -> Tensor:
            value = value.clone()
            value[:, 2] = acts["transformer.h.0"][:, 2]
            return value

        worse = score(model(other))
        with kedge.hook(model, "transformer.h.0", put):
            effect = (score(model(other)) - worse) / (clean_score - worse)
    close(torch.as_tensor(table["transformer.h.0"][2]).float(), effect, "a cell of the table")


@row(11, "a module skipped: its forward does not run")
def skipped() -> None:
    """With its input, and with another value, as the output."""
    model, x = programs.layers()
    called: list[int] = []
    middle = model[1]
    middle.forward = lambda value: called.append(1) or value.tanh()
    with kedge.hook(model, "1", kedge.skip()):
        same(model(x), model[2](model[0](x)), "the model without the module")
    with kedge.hook(model, "1", kedge.skip(torch.sin)):
        same(model(x), model[2](model[0](x).sin()), "the model with another module")
    check(not called, "the module ran")
    model(x)
    check(len(called) == 1, "the module does not run again after the block")


@row(12, "a value routed into a later layer of the same forward")
def routed() -> None:
    """The values and the gradient beside the composition written out."""
    model, x = programs.made(programs.Block)
    x.requires_grad_()
    deep = nn.Sequential(model, programs.Block(), programs.Block())
    with recipes.route(deep, "0", into="1"):
        found = deep(x)
        (gradient,) = torch.autograd.grad(found.sum(), x)
    plain = deep[2](deep[0](x))
    same(found, plain, "the output")
    same(gradient, torch.autograd.grad(plain.sum(), x)[0], "the gradient")


@row(13, "a parameter edited for one forward")
def edited_parameter() -> None:
    """Output and gradient beside `torch.func.functional_call`; the parameter stays as it is."""
    model, x = programs.layers()
    weight = model[0].weight
    before = weight.detach().clone()
    with kedge.hook(model, "0.weight:param", kedge.scale(0.5)):
        found = model(x)
        found.sum().backward()
    gradient = weight.grad.clone()
    weight.grad = None
    plain = functional_call(model, {"0.weight": weight * 0.5}, (x,))
    plain.sum().backward()
    same(found, plain, "the output")
    same(gradient, weight.grad, "the gradient")
    same(weight.detach(), before, "the parameter")


@row(17, "guided backpropagation through F.relu")
def guided() -> None:
    """Beside the same net written with a ReLU whose backward is cut by hand."""
    model, x = programs.rectified()
    found = recipes.guided_backprop(model, target=3)(x)
    same(found, guided_by_hand(model, x), "the attribution")


class Cut(torch.autograd.Function):
    """A ReLU that passes positive gradients alone."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient.clamp(min=0) * (x > 0)


def guided_by_hand(model: nn.Module, x: Tensor) -> Tensor:
    """Give the attribution of the net of functional ReLUs, written out."""
    x = x.clone().requires_grad_()
    hidden = Cut.apply(model.conv(x)).flatten(1)
    score = model.out(Cut.apply(model.hidden(hidden)))[:, 3].sum()
    return torch.autograd.grad(score, x)[0]


@row(35, "attributions: integrated gradients, DeepLIFT, relevance propagation, SHAP")
def attributions() -> None:
    """The first beside its sum by hand; what the second adds up to is what the score rises by."""
    smooth, x = programs.layers()
    integrated = recipes.integrated_gradients(smooth, target=2)(x)
    close(integrated, midpoints(smooth, x, 2), "integrated gradients")
    model, images = programs.rectified()
    with torch.no_grad():
        rise = (model(images) - model(torch.zeros_like(images)))[:, 3]
    lifted = recipes.deep_lift(model, target=3)(images)
    close(lifted.sum((1, 2, 3)), rise, "what DeepLIFT adds up to")
    raise Partly("integrated gradients and DeepLIFT; no relevance propagation, no sampled SHAP")


def midpoints(model: nn.Module, x: Tensor, target: int, steps: int = 2000) -> Tensor:
    """Integrate the gradients of each sample from zero by the midpoint rule."""
    places = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    precise = copy.deepcopy(model).double()
    found = []
    for sample in x.double():
        way = (places[:, None] * sample).requires_grad_()
        (gradients,) = torch.autograd.grad(precise(way)[:, target].sum(), way)
        found.append(gradients.mean(0) * sample)
    return torch.stack(found).float()


@row(36, "the graph of a forward drawn, also under no_grad")
def drawn() -> None:
    """Its operations and their arrows, and an SVG."""
    model, x = programs.made(programs.Block)
    with torch.no_grad():
        graph = kedge.figures.graph(lambda: model(x), model)
    names = [node.name for node in graph.nodes if node.kind == "operation"]
    check(names == ["linear", "gelu", "linear", "add"], f"the operations are {', '.join(names)}")
    check(graph.svg().startswith("<svg"), "no drawing")
    trained = kedge.figures.graph(lambda: model(x), model)
    check(trained.of_autograd, "with gradients it does not draw autograd's graph")


@row(37, "parameters, output sizes and multiply-adds in one table, before training")
def costs() -> None:
    """Beside `numel`, the output's shape and PyTorch's own counter of operations."""
    model, x = programs.rectified()
    table = kedge.sites(model, x)
    with FlopCounterMode(display=False) as counter:
        plain = model(x)
    whole = table[""]
    numbers = sum(parameter.numel() for parameter in model.parameters())
    check(whole.parameters == numbers, f"{whole.parameters} parameters, not {numbers}")
    adds = counter.get_total_flops() // 2
    check(whole.multiply_adds == adds, f"{whole.multiply_adds} multiply-adds, not {adds}")
    shapes = table["out"].outputs
    check(shapes == (tuple(plain.shape),), f"the output is {shapes}")


@row(39, "the same names for all architectures, and a logit lens")
def lens() -> None:
    """GPT-2 and Llama; every row of the lens beside the norm and the head called by hand."""
    for model, norm, parts in (
        (programs.gpt(3)[0], "transformer.ln_f", "transformer.h"),
        (programs.llama(3), "model.norm", "model.layers"),
    ):
        tokens = torch.randint(1, 50, (1, 6))
        named = recipes.blocks(model, tokens)
        layers = [f"{parts}.{layer}" for layer in range(3)]
        found = [selector.partition(":")[0] for selector in named.layers]
        check(found == layers, f"blocks are {', '.join(found)}")
        with torch.no_grad():
            rows = recipes.logit_lens(model, tokens)
            for layer, scores in zip(layers, rows, strict=True):
                hidden = plain_output(model, layer, tokens)
                plain = model.lm_head(model.get_submodule(norm)(hidden))
                same(scores, plain, f"the row of {layer}")


def plain_output(model: nn.Module, path: str, *args: Tensor) -> Tensor:
    """Return what a block gives in a run, by a hook of PyTorch; of a tuple the first."""
    kept: list[object] = []
    block = model.get_submodule(path)
    handle = block.register_forward_hook(lambda module, args, value: kept.append(value))
    model(*args)
    handle.remove()
    (value,) = kept
    if isinstance(value, tuple):
        value = value[0]
    assert isinstance(value, Tensor)  # noqa: S101 - as both architectures have it
    return value


@row(41, "interventions saved and shared as a file")
def shared() -> None:
    """Written, read and attached again: the same output to the bit."""
    model, x = programs.layers()
    calm = recipes.Interventions(
        {"0": recipes.Steering(torch.ones(8), 0.5), "1": kedge.clamp(-0.5, 0.5)}
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calm.safetensors"
        calm.save(path)
        again = recipes.Interventions.load(path)
    with again.on(model):
        found = model(x)
    hidden = (model[0](x) + 0.5).tanh().clamp(-0.5, 0.5)
    close(found, model[2](hidden), "the output")
    with calm.on(model):
        same(found, model(x), "the output of what was saved")
    same(F.linear(hidden, model[2].weight, model[2].bias), model[2](hidden), "the model")
