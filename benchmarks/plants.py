"""The runs that `calibrate.py` makes: healthy ones, and ones with a single fault, by the rule that is to find it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from faults import (
    Apply,
    Around,
    Direct,
    Lift,
    Wide,
    after,
    every_weight,
    is_weighted,
    normal,
    rate,
    rooted,
)
from nets import Autoencoder, Fault, Recurrent, Run, Transformer, adam, cnn, mlp, resnet, sgd
from torch import Tensor, nn

HALF, BRAIN = torch.float16, torch.bfloat16


def healthy() -> list[Run]:
    """Give runs that learn, over kinds of model, optimizers, activations, norms, learning rates and formats."""
    runs = [
        Run(f"mlp {depth} {act} {norm or 'plain'} {how}", partial(mlp, depth, act, norm), optimizer)
        for depth, act, norm in (
            (2, "relu", ""), (3, "gelu", ""), (3, "tanh", ""), (4, "relu", "layer"), (6, "relu", "batch"), (6, "tanh", "layer"),
        )
        for how, optimizer in (("sgd", sgd(0.05)), ("adam", adam(2e-3)))
    ]  # fmt: skip
    runs += [
        Run(f"cnn {act} {norm or 'plain'} {how}", partial(cnn, act, norm), optimizer)
        for act, norm in (("relu", ""), ("gelu", ""), ("relu", "batch"), ("tanh", "batch"))
        for how, optimizer in (("sgd", sgd(0.02)), ("adam", adam(3e-3)))
    ]
    runs += [
        Run("resnet batch sgd", resnet, sgd(0.1)),
        Run("resnet batch adam", resnet, adam(2e-3)),
        Run("resnet plain adam", partial(resnet, norm=False), adam(1e-3)),
        Run("resnet batch sgd bfloat16", resnet, sgd(0.05), half=BRAIN),
        Run("transformer pre gelu adam", Transformer, adam(1e-3)),
        Run(
            "transformer pre gelu adamw warmup clip",
            Transformer,
            adam(3e-3, weight_decay=0.1),
            warmup=40,
            clip=1.0,
        ),
        Run("transformer pre gelu 0.02 adam", partial(Transformer, std=0.02, depth=4), adam(1e-3)),
        Run(
            "transformer post relu adam",
            partial(Transformer, "relu", pre=False),
            adam(5e-4),
            warmup=40,
        ),
        Run("transformer pre silu sgd", partial(Transformer, "silu"), sgd(0.1)),
        Run("transformer pre gelu adam bfloat16", Transformer, adam(1e-3), half=BRAIN),
        Run("mlp 3 relu plain adam float16", partial(mlp, 3, "relu"), adam(2e-3), half=HALF),
        Run(
            "cnn relu batch adam float16",
            partial(cnn, "relu", "batch"),
            adam(3e-3),
            half=HALF,
            steps=100,
        ),
        Run("transformer pre gelu adam float16", Transformer, adam(1e-3), half=HALF, steps=100),
        Run("cnn relu batch sgd bfloat16", partial(cnn, "relu", "batch"), sgd(0.02), half=BRAIN),
        Run(
            "mlp 4 gelu layer adam bfloat16",
            partial(mlp, 4, "gelu", "layer"),
            adam(2e-3),
            half=BRAIN,
        ),
        Run("mlp 2 relu plain sgd slow", partial(mlp, 2, "relu"), sgd(0.003), steps=300),
        Run("mlp 2 relu plain adam slow", partial(mlp, 2, "relu"), adam(1e-4), steps=300),
        Run("mlp 2 relu plain adam long", partial(mlp, 2, "relu"), adam(1e-3), steps=800),
        Run(
            "mlp 2 relu plain sgd long small batch",
            partial(mlp, 2, "relu"),
            sgd(0.05),
            steps=800,
            batch=8,
        ),
        Run("mlp 8 relu batch sgd", partial(mlp, 8, "relu", "batch"), sgd(0.05)),
        Run("mlp 6 relu plain adam", partial(mlp, 6, "relu"), adam(1e-3)),
        Run("cnn relu plain adam deep", partial(cnn, "relu", depth=6), adam(1e-3)),
        Run(
            "mlp 1 relu plain sgd black border",
            partial(mlp, 1, "relu", width=512, border=10),
            sgd(0.05),
        ),
        Run("lstm adam", Recurrent, adam(3e-3)),
        Run("lstm sgd clip", Recurrent, sgd(0.3), clip=1.0),
        Run("autoencoder relu adam", Autoencoder, adam(2e-3), criterion=nn.MSELoss()),
        Run("autoencoder tanh sgd", partial(Autoencoder, "tanh"), sgd(0.5), criterion=None),
    ]
    return runs


def _models() -> dict[str, Run]:
    """Give the healthy runs that faults are planted in."""
    return {
        "mlp sgd": Run("mlp sgd", partial(mlp, 3, "relu"), sgd(0.05)),
        "mlp adam": Run("mlp adam", partial(mlp, 3, "relu", "layer"), adam(2e-3)),
        "cnn sgd": Run("cnn sgd", partial(cnn, "relu"), sgd(0.02)),
        "cnn adam": Run("cnn adam", partial(cnn, "relu", "batch"), adam(3e-3)),
        "resnet sgd": Run("resnet sgd", resnet, sgd(0.1)),
        "transformer adam": Run("transformer adam", Transformer, adam(1e-3)),
    }


def with_fault(name: str, fault: Fault, **how: Any) -> Run:
    """Plant a fault in one of the models."""
    run = _models()[name]
    return replace(run, name=f"{name}: {how.pop('says', '')}", fault=fault, **how)


def planted() -> dict[str, list[Run]]:
    """Give runs with one fault each, by the code of the rule that is to find it."""
    return {code: make() for code, make in PLANTS.items()}


def nan_born() -> list[Run]:
    """Plant operations outside their domain, a bad batch, and a rate that lets the run diverge."""

    def planted_at(
        name: str, nth: int, function: Callable[[Tensor], Tensor], says: str, birth: str
    ) -> Run:
        return with_fault(
            name, after(is_weighted, function, nth), says=says, births=frozenset({birth})
        )

    spoiled = Fault(inputs=lambda step, x: torch.where(x > 0.9, torch.nan, x) if step == 80 else x)
    return [
        planted_at("mlp adam", 1, lambda x: torch.log(x.relu()), "log of zero", "module 4.1"),
        planted_at("cnn sgd", 1, lambda x: x / x.relu(), "zero by zero", "module 2.1"),
        planted_at(
            "resnet sgd", 2, lambda x: x + (x - x.detach()).sqrt(), "sqrt'(0)", "backward 2.conv2.1"
        ),
        planted_at(
            "transformer adam", 2, lambda x: (x * 200).exp(), "exp", "module layers.0.mlp.0.1"
        ),
        with_fault(
            "cnn adam", spoiled, says="NaN in a batch", births=frozenset({"entry"}), since=80
        ),
        with_fault("mlp sgd", rate(40, 1e6), says="diverges"),
        *_around(),
        *_short_steps(),
    ]


def _around() -> list[Run]:
    """Plant operations beside a module, in the own forward of the container that holds it; and in the module, for comparison."""

    def run(
        says: str, births: set[str], inner: Callable[[], nn.Module], operation: Any = None
    ) -> Run:
        def change(model: nn.Module) -> None:
            model[4] = Around(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), inner(), operation)

        return with_fault("mlp adam", Fault(model=change), says=says, births=frozenset(births))

    def distance(x: Tensor) -> Tensor:
        return rooted(x) - x

    def linear() -> nn.Module:
        return nn.Linear(64, 64)

    beside = {"beside 4", "either 4"}
    return [
        run("0/0 beside a linear map", {"own 4"}, linear, lambda x: x / x),
        run("log beside a linear map", {"own 4"}, linear, lambda x: x.log()),
        run("norm'(0) beside a linear map", beside, linear, distance),
        run("root'(0) beside a norm", beside, lambda: nn.LayerNorm(64), lambda x: x.abs().pow(0.5)),
        run(
            "root'(0) beside a root",
            beside,
            lambda: Apply(lambda x: x * 1.0),
            lambda x: x.abs().pow(0.5),
        ),
        run("norm'(0) in the module", {"backward 4.inner"}, lambda: Apply(rooted)),
        run(
            "norm'(0) in the module, a sum beside",
            {"either 4.inner"},
            lambda: Apply(rooted),
            lambda x: x * 2,
        ),
    ]


def _short_steps() -> list[Run]:
    """Plant the same in runs of short steps, most of which are not measured."""
    since = 353

    def run(says: str, fault: Fault, *births: str, later: int = 0) -> Run:
        small = Run(
            "", partial(mlp, 3, "relu"), sgd(0.05), steps=1000, batch=32, since=since + later
        )
        return replace(
            small,
            name=f"mlp sgd in short steps: {says}",
            fault=fault,
            births=frozenset({"glanced", "unseen", *births}),
        )

    def change(model: nn.Module) -> None:
        model[3] = Around(model[3], nn.Linear(64, 64), lambda x: x.log(), since)

    return [
        run("log beside a linear map", Fault(model=change), "own 3", "produced log"),
        run(
            "NaN in a batch",
            Fault(inputs=lambda step, x: x * torch.nan if step == since else x),
            "entry",
            "produced addmm",
        ),
        run(
            "NaN in a loss",
            Fault(loss=lambda step, loss: loss * (torch.nan if step == since else 1.0)),
            "loss",
        ),
        run(
            "diverges",
            rate(since, 1e6),
            "stepped",
            "update",
            "module 3",
            "module 5",
            "module 7",
            later=2,
        ),
    ]


def near_overflow() -> list[Run]:
    """Bring values to the end of their format and back."""

    def lifted(limit: float) -> Fault:
        return after(is_weighted, nn.Sequential(Lift(limit), Apply(lambda x: x / (limit * 0.6))), 1)

    return [
        with_fault("mlp sgd", lifted(65504.0), half=HALF, says="float16"),
        with_fault("mlp adam", lifted(65504.0), half=HALF, says="float16"),
        with_fault("cnn adam", lifted(65504.0), half=HALF, steps=60, says="float16"),
        with_fault("transformer adam", lifted(65504.0), half=HALF, steps=60, says="float16"),
        with_fault("resnet sgd", lifted(3.3e38), half=BRAIN, steps=60, says="bfloat16"),
        with_fault("mlp sgd", lifted(3.4e38), says="float32"),
    ]


def underflow() -> list[Run]:
    """Train in float16 with losses too small for it, scaled by nothing."""

    def small(factor: float) -> Fault:
        return Fault(loss=lambda step, loss: loss * factor)

    return [
        with_fault(name, small(factor), half=HALF, steps=60, says=f"float16, loss x {factor:g}, unscaled")
        for name, factor in (
            ("mlp sgd", 1e-2), ("mlp adam", 1.0), ("cnn sgd", 1e-1),
            ("cnn adam", 1.0), ("transformer adam", 1.0), ("resnet sgd", 1e-2),
        )
    ]  # fmt: skip


def grad_explode() -> list[Run]:
    """Let the gradient outgrow its past: a rate that is raised, a loss that is multiplied."""
    growing = Fault(loss=lambda step, loss: loss * 1.2 ** max(0, step - 90))
    return [
        with_fault("mlp sgd", rate(100, 300), says="rate x 300"),
        with_fault("mlp sgd", growing, model=partial(mlp, 3, "tanh"), says="tanh, loss grows"),
        with_fault("cnn sgd", growing, model=partial(cnn, "gelu"), says="gelu, loss grows"),
        with_fault("resnet sgd", growing, says="loss grows"),
        with_fault("transformer adam", growing, optimizer=sgd(0.05), says="sgd, loss grows"),
        Run("lstm sgd: loss grows", Recurrent, sgd(0.1), fault=growing),
    ]


def grad_vanish() -> list[Run]:
    """Stack sigmoids, or let layers pass a hundredth of their gradient."""
    deep = Run("deep", partial(mlp, 10, "sigmoid"), sgd(0.1))

    def damp(model: nn.Module) -> None:
        for name, module in list(model.named_children())[1:-1]:
            if is_weighted(module):
                setattr(
                    model,
                    name,
                    nn.Sequential(module, Apply(lambda x: 0.02 * x + 0.98 * x.detach())),
                )

    return [
        replace(deep, name="10 sigmoid layers sgd"),
        replace(deep, name="12 sigmoid layers sgd", model=partial(mlp, 12, "sigmoid")),
        replace(
            deep,
            name="12 sigmoid layers adam",
            model=partial(mlp, 12, "sigmoid"),
            optimizer=adam(1e-3),
        ),
        replace(
            deep, name="9 narrow sigmoid layers sgd", model=partial(mlp, 9, "sigmoid", width=32)
        ),
        replace(
            deep,
            name="cnn, 9 sigmoid layers",
            model=partial(cnn, "sigmoid", depth=9),
            optimizer=sgd(0.05),
        ),
        replace(
            deep,
            name="6 tanh layers, damped",
            model=partial(mlp, 6, "tanh"),
            fault=Fault(model=damp),
        ),
        replace(
            deep,
            name="cnn, 6 relu layers, damped",
            model=partial(cnn, "relu", depth=6),
            fault=Fault(model=damp),
        ),
    ]


def grad_zero() -> list[Run]:
    """Put an operation without a slope into the forward."""
    return [
        with_fault("mlp sgd", after(is_weighted, torch.round, 1), says="round"),
        with_fault("mlp adam", after(is_weighted, torch.sign), says="sign"),
        with_fault(
            "cnn sgd", after(is_weighted, lambda x: (x > 0) * 1.0 + 0 * x, 1), says="comparison"
        ),
        with_fault("cnn adam", after(is_weighted, lambda x: x.clamp(50, 60), 1), says="clamp"),
        with_fault("resnet sgd", after(is_weighted, lambda x: 0 * x, 2), says="product with zero"),
        with_fault("transformer adam", after(is_weighted, torch.floor, 3), says="floor"),
    ]


def spike() -> list[Run]:
    """Feed one bad batch, or take one step that is far too long."""

    def bad(step: int, x: Tensor) -> Tensor:
        return x * 50 + 30 * torch.randn_like(x) if step == 101 else x

    return [
        with_fault("mlp sgd", Fault(inputs=bad), optimizer=sgd(0.02), says="bad batch"),
        with_fault("mlp sgd", rate(101, 30, 102), says="one long step"),
        with_fault("cnn sgd", Fault(inputs=bad), says="bad batch"),
        with_fault(
            "cnn adam",
            Fault(loss=lambda step, loss: loss * (1000 if step == 101 else 1)),
            says="one loss x 1000",
        ),
        with_fault(
            "resnet sgd",
            Fault(loss=lambda step, loss: loss * (300 if step == 101 else 1)),
            says="one loss x 300",
        ),
        with_fault("transformer adam", rate(101, 100, 102), says="one long step"),
    ]


def dead_channel() -> list[Run]:
    """Push biases down, at the start or by one long step."""

    def push(nth: int, low: float) -> Fault:
        def change(model: nn.Module) -> None:
            module = [m for m in model.modules() if is_weighted(m)][nth]
            nn.init.constant_(module.bias, low)

        return Fault(model=change)

    def later(step: int, model: nn.Module, optimizer: Any) -> None:
        if step == 40:
            model[1].bias.data.sub_(50)

    return [
        with_fault("mlp sgd", push(0, -20), says="bias of the first"),
        with_fault("mlp sgd", push(2, -20), says="bias of the last hidden"),
        with_fault("cnn sgd", push(1, -20), says="bias of the second"),
        with_fault("mlp sgd", Fault(before_step=later), says="bias falls at step 40"),
        with_fault("mlp sgd", push(1, -20), batch=4, says="small batch"),
        Run("mlp adam: rate 0.3", partial(mlp, 4, "relu"), adam(0.3)),
    ]


def saturated() -> list[Run]:
    """Drive activations to their ends, by weights and inputs that are too large."""

    def large(factor: float) -> Fault:
        return every_weight(lambda module: module.weight.data.mul_(factor))

    plain = Run("mlp", partial(mlp, 4, "tanh"), sgd(0.01))
    return [
        replace(plain, name="tanh, weights x 40", fault=large(40)),
        replace(
            plain,
            name="tanh, inputs x 100",
            fault=Fault(inputs=lambda step, x: x * 100),
            optimizer=adam(1e-3),
        ),
        replace(
            plain, name="sigmoid, weights x 60", model=partial(mlp, 3, "sigmoid"), fault=large(60)
        ),
        replace(
            plain, name="hardtanh, weights x 20", model=partial(mlp, 3, "hardtanh"), fault=large(20)
        ),
        replace(plain, name="tanh, adam with rate 0.5", optimizer=adam(0.5)),
        replace(plain, name="cnn tanh, weights x 30", model=partial(cnn, "tanh"), fault=large(30)),
    ]


def update_ratio() -> list[Run]:
    """Take steps that are far too long, or next to nothing."""
    half = Fault(model=lambda model: model.bfloat16(), inputs=lambda step, x: x.bfloat16())
    return [
        with_fault(
            "mlp sgd",
            Fault(),
            model=partial(mlp, 3, "tanh"),
            optimizer=sgd(3.0),
            says="tanh, sgd with rate 3",
        ),
        Run(
            "cnn batch: sgd with rate 2, decay 0.1",
            partial(cnn, "relu", "batch"),
            sgd(2.0, weight_decay=0.1),
        ),
        with_fault("mlp sgd", Fault(), optimizer=sgd(1e-8), says="sgd with rate 1e-8"),
        with_fault("cnn adam", Fault(), optimizer=adam(1e-9), says="adam with rate 1e-9"),
        with_fault("resnet sgd", Fault(), optimizer=sgd(1e-7), says="sgd with rate 1e-7"),
        with_fault("mlp adam", half, optimizer=adam(1e-6), says="bfloat16 weights, rate 1e-6"),
    ]


def init_scale() -> list[Run]:
    """Draw weights that do not fit the activation."""
    deep = Run("mlp", partial(mlp, 6, "relu"), adam(1e-3))
    return [
        replace(deep, name="mlp, std 1", fault=normal(1.0)),
        replace(deep, name="mlp, std 0.01", fault=normal(0.01)),
        replace(deep, name="mlp tanh-free, 3 x Xavier", model=partial(mlp, 8, "gelu"),
                fault=every_weight(lambda module: nn.init.xavier_normal_(module.weight, gain=4.0))),
        replace(deep, name="cnn, std 0.5", model=partial(cnn, "relu", depth=6), fault=normal(0.5)),
        replace(deep, name="cnn, std 0.01", model=partial(cnn, "relu", depth=6), fault=normal(0.01)),
        replace(deep, name="resnet without norm, std 0.4", model=partial(resnet, norm=False, blocks=4), fault=normal(0.4)),
    ]  # fmt: skip


def scale_drift() -> list[Run]:
    """Let the scale of what flows grow or shrink without end."""

    def moving(factor: float) -> Fault:
        return Fault(inputs=lambda step, x: x * factor**step)

    def pumped(factor: float) -> Fault:
        def change(step: int, model: nn.Module, optimizer: Any) -> None:
            [m for m in model.modules() if is_weighted(m)][1].weight.data.mul_(factor)

        return Fault(before_step=change)

    return [
        with_fault("mlp sgd", moving(1.03), optimizer=sgd(1e-3), says="inputs grow"),
        with_fault("mlp adam", pumped(1.03), says="a weight is pumped up"),
        with_fault("cnn adam", pumped(1.03), says="a weight is pumped up"),
        with_fault("transformer adam", pumped(1.04), says="a weight is pumped up"),
        with_fault(
            "cnn sgd", Fault(), optimizer=sgd(0.05, weight_decay=0.6), says="a decay that wins"
        ),
        with_fault("resnet sgd", pumped(1.04), says="a weight is pumped up"),
    ]


def unused_param() -> list[Run]:
    """Leave parameters out of the forward."""

    def idle(model: nn.Module) -> None:
        model.register_parameter("temperature", nn.Parameter(torch.ones(4)))

    return [
        with_fault("mlp sgd", Fault(model=idle), says="in no forward"),
        with_fault("transformer adam", Fault(model=idle), says="in no forward"),
        with_fault("resnet sgd", after(is_weighted, lambda x: x.detach(), 2), says="detached"),
    ]


def not_optimized() -> list[Run]:
    """Leave parameters out of the optimizer."""

    def cut(name: str) -> Fault:
        return Fault(
            trained=lambda model: [p for n, p in model.named_parameters() if not n.startswith(name)]
        )

    return [
        with_fault("cnn sgd", cut("0."), says="stem not in the optimizer"),
        with_fault("transformer adam", cut("head"), says="head not in the optimizer"),
        with_fault("mlp adam", cut("1.weight"), says="a weight not in the optimizer"),
    ]


def never_called() -> list[Run]:
    """Add a module that nothing calls."""

    def idle(model: nn.Module) -> None:
        model.get_submodule("layers.0" if isinstance(model, Transformer) else "3").aux = nn.Linear(
            8, 8
        )

    return [
        with_fault("mlp sgd", Fault(model=idle), says="in a ReLU"),
        with_fault("cnn sgd", Fault(model=idle), says="in a ReLU"),
        with_fault("resnet sgd", Fault(model=idle), says="in a block"),
        with_fault("transformer adam", Fault(model=idle), says="in a layer"),
        with_fault("cnn adam", Fault(model=idle), says="in a ReLU"),
        with_fault("mlp sgd", Fault(), model=Direct, says="only its .forward()"),
    ]


def saved_memory() -> list[Run]:
    """Give one module most of what is saved."""
    return [
        with_fault(name, after(is_weighted, Wide(), 0), steps=4, says="a wide detour")
        for name in ("mlp sgd", "mlp adam", "cnn sgd", "resnet sgd", "transformer adam")
    ]


PLANTS: dict[str, Callable[[], list[Run]]] = {
    "NAN-BORN": nan_born,
    "NEAR-OVERFLOW": near_overflow,
    "UNDERFLOW": underflow,
    "GRAD-EXPLODE": grad_explode,
    "GRAD-VANISH": grad_vanish,
    "GRAD-ZERO": grad_zero,
    "SPIKE": spike,
    "DEAD-CHANNEL": dead_channel,
    "SATURATED": saturated,
    "UPDATE-RATIO": update_ratio,
    "INIT-SCALE": init_scale,
    "SCALE-DRIFT": scale_drift,
    "NOT-OPTIMIZED": not_optimized,
    "UNUSED-PARAM": unused_param,
    "NEVER-CALLED": never_called,
    "SAVED-MEMORY": saved_memory,
}
