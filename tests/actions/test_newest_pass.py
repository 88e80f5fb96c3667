"""Which recorded values are those of the newest pass, where the program calls the model, its parts, or both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.errors import NotRecorded
from kedge.testing import assert_same_bits


class Translator(nn.Module):
    """An encoder and a decoder, which the program may call itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = self.encoder(x) if memory is None else memory
        return self.decoder(x + memory)

    def by_parts(self, x: Tensor) -> Tensor:
        """Encode once, and call the decoder for every token."""
        memory = self.encoder(x)
        for _ in range(3):
            x = self.decoder(x + memory)
        return x

    def by_model(self, x: Tensor) -> Tensor:
        """Encode once, and call the model for every token."""
        memory = self.encoder(x)
        for _ in range(3):
            x = self(x, memory)
        return x


@pytest.mark.parametrize("how", ["by_parts", "by_model"])
@pytest.mark.parametrize(
    "names",
    [["encoder", "decoder"], ["encoder.0", "decoder.1"], ["encoder:in[input]", "decoder.2"]],
)
def test_an_encoder_called_once_keeps_its_value_while_the_decoder_is_called(
    how: str, names: list[str]
) -> None:
    """Its value is what the newest run used, in every round, and so is its gradient."""
    model = Translator()
    with kedge.hook(model, [*names, "encoder.0.weight:param.grad"], kedge.record()) as acts:
        for _ in range(3):
            x = torch.randn(2, 3)
            getattr(model, how)(x).sum().backward()
            before = dict(acts)
            assert list(before) == [*names, "encoder.0.weight:param.grad"]
            with torch.no_grad():
                memory = model.encoder(x)
                wanted = {"encoder": memory, "encoder.0": model.encoder[0](x)}
            first = names[0]
            assert_same_bits(before[first], wanted.get(first, x))


def test_the_encoders_value_is_that_of_the_newest_input() -> None:
    """Not that of the first round."""
    model = Translator()
    x, other = torch.randn(2, 3), torch.randn(2, 3)
    wanted = model.encoder(other).detach()
    with kedge.hook(model, "encoder, decoder", kedge.record()) as acts:
        model.by_parts(x)
        model.by_parts(other)
        assert_same_bits(acts["encoder"], wanted)


class Gan(nn.Module):
    """Two nets in a container that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.judge = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))

    def train_judge(self) -> Tensor:
        """Judge something real, and something made."""
        self.judge(torch.randn(2, 3)).sum().backward()
        made: Tensor = self.make(torch.randn(2, 3))
        self.judge(made.detach()).sum().backward()
        return made

    def train_make(self, made: Tensor) -> None:
        """Judge it for the gradient of what made it."""
        self.judge(made).sum().backward()


_OF_GAN = ["make", "judge", "make:out.grad", "judge:out.grad", "make.0.weight:param.grad"]


def _as_container(gan: Gan, s: kedge.Session) -> list[Any]:
    return [s.hook(gan, _OF_GAN, kedge.record())]


def _as_two_roots(gan: Gan, s: kedge.Session) -> list[Any]:
    return [
        s.hook(one, [":out", ":out.grad", "0.weight:param.grad"], kedge.record())
        for one in (gan.make, gan.judge)
    ]


@pytest.mark.parametrize("hook", [_as_container, _as_two_roots])
@pytest.mark.parametrize("judge_first", [True, False])
def test_both_nets_of_a_gan_have_values_in_every_round(hook: Any, *, judge_first: bool) -> None:
    """The judge is called before and after what it judges was made, with gradients of each."""
    gan = Gan()
    with kedge.session() as s:
        handles = hook(gan, s)
        for _ in range(3):
            if judge_first:
                made = gan.train_judge()
                gan.train_make(made)
            else:
                gan.train_make(gan.make(torch.randn(2, 3)))
                made = gan.train_judge()
            if len(handles) == 1:
                assert set(handles[0]) == set(_OF_GAN)
            else:
                wanted = {":out", ":out.grad", "0.weight:param.grad"}
                assert set(handles[0]) == set(handles[1]) == wanted
            name = "make" if len(handles) == 1 else ""
            assert_same_bits(handles[0][name], made.detach())


class Deep(nn.Module):
    """A model with a layer that is not always called, and a method that calls the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.head = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))

    def encode(self, x: Tensor, *, deep: bool) -> Tensor:
        """Call the parts."""
        x = self.a(x)
        return self.b(x) if deep else x

    def forward(self, x: Tensor, *, deep: bool = True) -> Tensor:
        return self.head(self.encode(x, deep=deep))


@pytest.mark.parametrize("how", ["encode", "__call__"])
def test_a_part_that_the_newest_round_left_out_has_no_value(how: str) -> None:
    """Whether a method calls the parts or the model does, a value of an older input does not stand beside new ones."""
    model = Deep()
    with kedge.hook(model, "a, b", kedge.record()) as acts:
        getattr(model, how)(torch.zeros(2, 3), deep=True)
        assert list(acts) == ["a", "b"]
        for _ in range(2):
            getattr(model, how)(torch.ones(2, 3), deep=False)
            assert list(acts) == ["a"]
        with pytest.raises(NotRecorded, match="was not reached there"):
            acts["b"]
        getattr(model, how)(torch.ones(2, 3), deep=True)
        assert list(acts) == ["a", "b"]


def test_a_layer_inside_a_part_that_is_called_again_without_it_has_no_value() -> None:
    """The part is the call that the program made, also if it is not hooked itself."""
    model = nn.ModuleDict({"first": Deep(), "second": nn.Linear(1, 1)})
    with kedge.hook(model, "first.a, first.b, second", kedge.record()) as acts:
        for deep in (True, False):
            y = model["first"](torch.ones(2, 3), deep=deep)
            for _ in range(2):
                y = model["second"](y)
    assert list(acts) == ["first.a", "second"]


@pytest.mark.parametrize("how", ["model", "parts"])
def test_a_loop_over_a_head_leaves_the_values_of_what_came_before(how: str) -> None:
    """The features are computed once, and each step of an optimizer calls the head alone."""
    model = Deep()
    optimizer = torch.optim.SGD(model.head.parameters(), 0.1)
    with kedge.hook(model, "a, b, head, head.1:out.grad", kedge.record()) as acts:
        if how == "model":
            model(torch.ones(2, 3))
        features = model.encode(torch.ones(2, 3), deep=True).detach()
        for _ in range(3):
            model.head(features).sum().backward()
            optimizer.step()
        assert set(acts) == {"a", "b", "head", "head.1:out.grad"}
        assert_same_bits(acts["b"], features)


def test_with_accumulated_gradients_the_newest_micro_batch_has_the_values() -> None:
    """Of several forwards before a step, also if parts make them; a part that the last one left out is absent."""
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with kedge.hook(model, "a, b, a:out.grad, b:out.grad", kedge.record()) as acts:
        for deep in (True, True, False):
            model.encode(torch.ones(2, 3), deep=deep).sum().backward()
        optimizer.step()
        assert list(acts) == ["a", "a:out.grad"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_calls_again_ends_nothing(*, reentrant: bool) -> None:
    """A recompute repeats a call that the program made before; what it made since stays."""
    model = Translator()
    x = torch.randn(2, 3, requires_grad=True)
    with kedge.hook(model, "encoder, decoder, decoder:out.grad", kedge.record()) as acts:
        for _ in range(2):
            memory = checkpoint(model.encoder, x, use_reentrant=reentrant)
            model.decoder(model.decoder(memory)).sum().backward()
            assert set(acts) == {"encoder", "decoder", "decoder:out.grad"}
            assert_same_bits(acts["encoder"], memory.detach())


def test_a_gradient_stays_while_nothing_of_a_newer_call_is_differentiated() -> None:
    """A forward for validation between two backward passes does not end the gradients of the first."""
    model = Deep()
    with kedge.hook(model, "a:out.grad, b:out.grad, head:out.grad", kedge.record()) as grads:
        hidden = model.encode(torch.ones(2, 3), deep=True)
        hidden.sum().backward(retain_graph=True)
        with torch.no_grad():
            model(torch.ones(2, 3))
        model.head(hidden).sum().backward()
        assert set(grads) == {"a:out.grad", "b:out.grad", "head:out.grad"}
