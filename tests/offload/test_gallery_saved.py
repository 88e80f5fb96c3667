"""The cases of PyTorch's tutorials on saved tensors, written with Kedge."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

import kedge


class Product(nn.Module):
    """The product of two tensors."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b


class Square(nn.Module):
    """The square of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x**2


def test_s1_a_product_saves_both_factors() -> None:
    """S1: of a product each factor is saved for the other's gradient, seen when packed and when unpacked."""
    packed: list[Tensor] = []
    unpacked: list[Tensor] = []

    def pack(value: Tensor) -> Tensor:
        packed.append(value)
        return value

    def unpack(value: Tensor) -> Tensor:
        unpacked.append(value)
        return value

    a = torch.ones(5, requires_grad=True)
    b = torch.ones(5, requires_grad=True) * 2
    with kedge.session() as s:
        product = Product()
        acts = s.hook(product, ":saved", kedge.record())
        s.hook(product, ":saved", kedge.packed(pack, unpack))
        y = product(a, b)
        assert [(str(event.site), label) for event, label in s.timeline()] == [
            *(
                (f":saved[{i}]", label)
                for i in (0, 1)
                for label in ("record()", repr(kedge.packed(pack, unpack)))
            ),
        ]
        y.sum().backward()

    operation = y.grad_fn
    assert operation is not None
    assert operation.name() == "MulBackward0"
    assert [acts[f":saved[{i}]"].tolist() for i in (0, 1)] == [value.tolist() for value in packed]
    assert sorted(value[0].item() for value in packed) == [1, 2]
    assert sorted(value[0].item() for value in unpacked) == [1, 2]
    assert torch.equal(a.grad, torch.full((5,), 2.0))


def test_s2_a_pair_that_scales_and_scales_back() -> None:
    """S2: packed as four times the value and unpacked as a quarter, the gradient of x squared is 2x to the last bit."""
    x = torch.randn(5, requires_grad=True)
    with kedge.hook(square := Square(), "**:saved", kedge.packed(lambda t: t * 4, lambda p: p / 4)):
        square(x).sum().backward()

    assert torch.equal(x.grad, 2 * x)


def test_s3_a_pair_that_puts_tensors_in_a_list() -> None:
    """S3: packed into a list and unpacked by the index, the gradient is the same."""
    held: list[Tensor] = []

    def pack(value: Tensor) -> int:
        held.append(value)
        return len(held) - 1

    x = torch.randn(5, requires_grad=True)
    with kedge.hook(square := Square(), "**:saved", kedge.packed(pack, lambda i: held[i])):
        square(x).sum().backward()

    assert len(held) == 1
    assert torch.equal(x.grad, 2 * x)


def test_s6_replicas_in_threads_are_hooked_as_the_model_is() -> None:
    """S6: in threads that each call a replica, as DataParallel does, every tensor saved in a module is packed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(8, 4)
    model(x).sum().backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()
    threads: list[str] = []

    def pack(value: Tensor) -> Any:
        threads.append(threading.current_thread().name)
        return value.clone()

    def work(replica: nn.Module, part: Tensor) -> None:
        replica(part).sum().backward()

    with kedge.hook(model, "**:saved", kedge.packed(pack, lambda value: value)):
        workers = [
            threading.Thread(target=work, args=(_replica(model), part), name=f"replica-{i}")
            for i, part in enumerate(x.chunk(2))
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    assert sorted(threads) == [f"replica-{i}" for i in (0, 1) for _ in range(4)]
    for one, param in zip(plain, model.parameters(), strict=True):
        assert torch.allclose(one, param.grad)


def _replica(model: nn.Module) -> nn.Module:
    """Make a replica as DataParallel does, on the same device."""
    replica = model._replicate_for_data_parallel()  # type: ignore[operator]
    for name, child in model._modules.items():
        twin = child._replicate_for_data_parallel()  # type: ignore[operator, union-attr]
        twin._parameters = dict(child._parameters)  # type: ignore[union-attr]
        replica._modules[name] = twin
    return replica
