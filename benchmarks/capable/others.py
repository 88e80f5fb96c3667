"""Other tools, each on rows that its own words serve with little effort; those that are installed."""

from __future__ import annotations

import contextlib
import importlib.util

import torch
from torch import Tensor, nn

from capable import programs
from capable.changing import by_hand, guided_by_hand, midpoints
from capable.reading import hooks_of
from capable.row import Lacking, Partly, beside, check, close, same

INSTALLED = [tool for tool in ("captum", "nnsight", "torchlens") if importlib.util.find_spec(tool)]

if "captum" in INSTALLED:
    import captum.attr

    @beside("captum", 1)
    def captum_output() -> None:
        """Read one layer."""
        model, x = programs.layers()
        found = captum.attr.LayerActivation(model, model[1]).attribute(x)
        same(found, model[1](model[0](x)), "the output")

    @beside("captum", 2)
    def captum_structure() -> None:
        """Read a layer that returns a dict."""
        model, x = programs.made(programs.Overwrites)
        found = captum.attr.LayerActivation(model, model.parts).attribute(x)
        same(found["rest"][0], model.parts.b(x), "the tensor")

    @beside("captum", 5)
    def captum_calls() -> None:
        """Read a layer that is called three times."""
        model, x = programs.made(programs.Thrice)
        found = captum.attr.LayerActivation(model, model.layer).attribute(x)
        check(isinstance(found, (list, tuple)) and len(found) == 3, "one value for three calls")

    @beside("captum", 17)
    def captum_guided() -> None:
        """Cut the gradients at ReLUs that are functions."""
        model, x = programs.rectified()
        found = captum.attr.GuidedBackprop(model).attribute(x.clone().requires_grad_(), target=3)
        given = x.clone().requires_grad_()
        (plain,) = torch.autograd.grad(model(given)[:, 3].sum(), given)
        check(not torch.equal(found, plain), "it gives the plain gradient, silently")
        same(found, guided_by_hand(model, x), "the attribution")

    @beside("captum", 18)
    def captum_after_an_error() -> None:
        """Raise an error in the model."""
        model, _ = programs.layers()
        before = hooks_of(model)
        with contextlib.suppress(RuntimeError):
            captum.attr.LayerActivation(model, model[1]).attribute(torch.randn(5, 9))
        check(hooks_of(model) == before, "a hook is left")

    @beside("captum", 35)
    def captum_attributions() -> None:
        """Integrated gradients and DeepLIFT on ReLUs that are functions; the others by name."""
        smooth, x = programs.layers()
        integrated = captum.attr.IntegratedGradients(smooth).attribute(x, target=2)
        close(integrated, midpoints(smooth, x, 2), "integrated gradients")
        for name in ("LRP", "ShapleyValueSampling", "KernelShap", "DeepLiftShap"):
            check(hasattr(captum.attr, name), f"no {name}")
        model, images = programs.rectified()
        with torch.no_grad():
            rise = (model(images) - model(torch.zeros_like(images)))[:, 3]
        lifted = captum.attr.DeepLift(model).attribute(images, target=3).sum((1, 2, 3))
        if not torch.allclose(lifted, rise, atol=1e-4):
            raise Partly("DeepLIFT through `F.relu` does not add up, silently; LRP, SHAP not run")
        raise Partly("LRP and SHAP are there and were not run")


if "nnsight" in INSTALLED:
    from nnsight import NNsight

    @beside("nnsight", 1)
    def nnsight_output() -> None:
        """Read one module."""
        model, x = programs.layers()
        wrapped = NNsight(model)
        with wrapped.trace(x):
            found = wrapped[1].output.save()
        same(found, model[1](model[0](x)), "the output")

    @beside("nnsight", 2)
    def nnsight_overwritten() -> None:
        """Read a structure that is overwritten later."""
        model, x = programs.made(programs.Overwrites)
        plain = model.parts.b(x)
        wrapped = NNsight(model)
        with wrapped.trace(x), torch.no_grad():
            found = wrapped.parts.output.save()
        with wrapped.trace(x), torch.no_grad():
            copied = wrapped.parts.output["rest"][0].clone().save()
        same(copied, plain, "the copied tensor")
        if not torch.equal(found["rest"][0], plain):
            raise Partly("with `clone()`; without it the later value, silently")

    @beside("nnsight", 4)
    def nnsight_keyword() -> None:
        """Read a keyword argument and its gradient."""
        model, x = programs.made(programs.Keyword)
        wrapped = NNsight(model)
        with wrapped.trace(x):
            found = wrapped.scaled.inputs[1]["by"].save()
            loss = wrapped.output.sum()
            with loss.backward():
                gradient = found.grad.save()
        same(found, model.first(x).sin(), "the argument")
        same(gradient, x, "the gradient")

    @beside("nnsight", 6)
    def nnsight_operations() -> None:
        """Read a function and a sum in a forward."""
        model, x = programs.made(programs.Block)
        wrapped = NNsight(model)
        with wrapped.trace(x):
            found = wrapped.source.F_gelu_0.output.save()
        same(found, nn.functional.gelu(model.up(x)), "F.gelu")
        if "add" not in str(wrapped.source):
            raise Partly("F.gelu; the sum, written `+`, has no name")

    @beside("nnsight", 8)
    def nnsight_variable() -> None:
        """Read a variable of a forward."""
        model, x = programs.made(programs.Block)
        wrapped = NNsight(model)
        with wrapped.trace(x):
            found = wrapped.source.hidden_0.output.save()
        same(found, nn.functional.gelu(model.up(x)), "the variable")

    @beside("nnsight", 9)
    def nnsight_patched() -> None:
        """Put one run's block output into another."""
        model, clean = programs.gpt()
        other = clean.clone()
        other[0, 2] = 7
        with torch.no_grad():
            plain = by_hand(model, clean, other)
            wrapped = NNsight(model)
            with wrapped.trace(clean):
                kept = wrapped.transformer.h[0].output.save()
            with wrapped.trace(other):
                wrapped.transformer.h[0].output = kept
                found = wrapped.output.logits.save()
        same(found, plain, "the patched run")

    @beside("nnsight", 11)
    def nnsight_skipped() -> None:
        """Leave a module out."""
        model, x = programs.layers()
        wrapped = NNsight(model)
        with wrapped.trace(x):
            wrapped[1].skip(wrapped[0].output)
            found = wrapped.output.save()
        same(found, model[2](model[0](x)), "the model without the module")

    @beside("nnsight", 12)
    def nnsight_routed() -> None:
        """Put a value in the place of a later one."""
        model, x = programs.made(programs.Block)
        deep = nn.Sequential(model, programs.Block(), programs.Block())
        wrapped = NNsight(deep)
        with wrapped.trace(x):
            early = wrapped[0].output
            wrapped[1].output = early
            found = wrapped.output.save()
        same(found, deep[2](deep[0](x)), "the output")

    @beside("nnsight", 18)
    def nnsight_after_an_error() -> None:
        """Raise an error in the model."""
        model, _ = programs.layers()
        before = hooks_of(model)
        wrapped = NNsight(model)
        try:
            with wrapped.trace(torch.randn(5, 9)):
                wrapped[1].output.save()
        except Exception:  # noqa: BLE001 - which error it is, is not the question
            check(hooks_of(model) == before, "hooks are left")
            replaced = sum("forward" in vars(module) for module in model.modules())
            check(
                not replaced, f"`forward` stays replaced on {replaced} modules, as without an error"
            )
            return
        raise Lacking("no error")


if "torchlens" in INSTALLED:
    import torchlens

    def called(log: object, name: str) -> list[Tensor]:
        """Return the outputs of all operations of a name, in order."""
        return [op.out for op in log.layer_list if op.func_name.strip("_") == name]

    @beside("torchlens", 1)
    def torchlens_output() -> None:
        """Read one module."""
        model, x = programs.layers()
        found = torchlens.trace(model, x)["1"].out
        same(found, model[1](model[0](x)), "the output")

    @beside("torchlens", 2)
    def torchlens_overwritten() -> None:
        """Read a linear layer's output that is overwritten later."""
        model, x = programs.made(programs.Overwrites)
        plain = model.parts.b(x)
        with torch.no_grad():
            found = called(torchlens.trace(model, x), "linear")
        same(found[1], plain, "the tensor")

    @beside("torchlens", 5)
    def torchlens_calls() -> None:
        """Read the three calls of one module."""
        model, x = programs.made(programs.Thrice)
        found = called(torchlens.trace(model, x), "linear")
        check(len(found) == 3, f"{len(found)} calls of three")
        for call in range(3):
            plain = model.layer(x)
            same(found[call], plain, f"call {call}")
            x = plain.tanh()

    @beside("torchlens", 6)
    def torchlens_operations() -> None:
        """Read a function and a sum in a forward."""
        model, x = programs.made(programs.Block)
        log = torchlens.trace(model, x)
        hidden = nn.functional.gelu(model.up(x))
        (gelu,), (total,) = called(log, "gelu"), called(log, "add")
        same(gelu, hidden, "F.gelu")
        same(total, x + model.down(hidden), "the sum")
