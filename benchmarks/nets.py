"""Small networks, data and a training loop: what `calibrate.py` judges the rules by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name for it
from torch.optim import SGD, Adam, AdamW, Optimizer

TOKENS, LENGTH = 32, 16
ACTS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "silu": nn.SiLU, "hardtanh": nn.Hardtanh,
}  # fmt: skip


def mlp(depth: int, act: str, norm: str = "", *, width: int = 64, border: int = 0) -> nn.Sequential:
    """Flatten, after a black border, then depth hidden layers and a linear output."""
    layers: list[nn.Module] = [*([nn.ZeroPad2d(border)] if border else []), nn.Flatten()]
    for i in range(depth):
        layers.append(nn.Linear((8 + 2 * border) ** 2 if i == 0 else width, width))
        layers += {"": [], "layer": [nn.LayerNorm(width)], "batch": [nn.BatchNorm1d(width)]}[norm]
        layers.append(ACTS[act]())
    return nn.Sequential(*layers, nn.Linear(width, 10))


def cnn(act: str, norm: str = "", *, depth: int = 3, width: int = 16) -> nn.Sequential:
    """Some 3x3 convolutions, pooling, and a linear output."""
    layers: list[nn.Module] = []
    for i in range(depth):
        layers.append(nn.Conv2d(1 if i == 0 else width, width, 3, padding=1))
        layers += [nn.BatchNorm2d(width)] if norm else []
        layers.append(ACTS[act]())
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(width * 16, 10))


class Residual(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, width: int, *, norm: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=not norm)
        self.norm1 = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=not norm)
        self.norm2 = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return self.relu(x + inner)


def resnet(*, norm: bool = True, blocks: int = 3, width: int = 16) -> nn.Sequential:
    """A stem, residual blocks, global pooling, a linear output."""
    stem = nn.Conv2d(1, width, 3, padding=1)
    inner = [Residual(width, norm=norm) for _ in range(blocks)]
    return nn.Sequential(
        stem, nn.ReLU(), *inner, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
    )


class Attention(nn.Module):
    """Causal self-attention, its softmax a module."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = self.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min)) @ v
        return self.out(mixed.transpose(1, 2).reshape(n, length, width))


class Layer(nn.Module):
    """One layer of a transformer, with its norms before or after."""

    def __init__(self, width: int, act: str, *, pre: bool) -> None:
        super().__init__()
        self.pre = pre
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, 4)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), ACTS[act](), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.pre:
            x = x + self.attn(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


class Transformer(nn.Module):
    """A causal language model; gives logits as [n, tokens, length]."""

    def __init__(
        self,
        act: str = "gelu",
        *,
        pre: bool = True,
        depth: int = 3,
        width: int = 48,
        std: float | None = None,
    ) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(TOKENS, width), nn.Embedding(LENGTH, width)
        self.layers = nn.Sequential(*(Layer(width, act, pre=pre) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, TOKENS, bias=False)
        for weight in (p for p in self.parameters() if p.dim() > 1 and std is not None):
            nn.init.normal_(weight, std=std or 0.0)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.layers(x))).transpose(1, 2)


class Recurrent(nn.Module):
    """An LSTM over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 48, batch_first=True), nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.lstm(images.squeeze(1))[0][:, -1])


class Autoencoder(nn.Module):
    """Images in, images out, through a narrow middle."""

    def __init__(self, act: str = "relu") -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 48), ACTS[act](), nn.Linear(48, 12)
        )
        self.decoder = nn.Sequential(
            nn.Linear(12, 48), ACTS[act](), nn.Linear(48, 64), nn.Sigmoid()
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(self.encoder(images)).view_as(images)


def _digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(
        data.target
    )


def _sequences() -> tuple[Tensor, Tensor]:
    """Sequences in which a token is the sum of the two before it, now and then a random one."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(TOKENS, (2048, LENGTH + 1), generator=draw)
    noise = torch.rand(ids.shape, generator=draw) < 0.05
    for i in range(2, LENGTH + 1):
        ids[:, i] = torch.where(noise[:, i], ids[:, i], (ids[:, i - 1] + ids[:, i - 2]) % TOKENS)
    return ids[:, :-1], ids[:, 1:]


def sgd(lr: float, **how: Any) -> Callable[[Any], Optimizer]:
    """SGD with momentum."""
    return partial(SGD, lr=lr, momentum=how.pop("momentum", 0.9), **how)


def adam(lr: float, **how: Any) -> Callable[[Any], Optimizer]:
    """Adam, or AdamW where a decay is given."""
    return partial(AdamW if "weight_decay" in how else Adam, lr=lr, **how)


@dataclass(frozen=True)
class Fault:
    """What is done to an otherwise healthy run; each is given what it changes."""

    model: Callable[[nn.Module], Any] = lambda model: None
    inputs: Callable[[int, Tensor], Tensor] = lambda step, x: x
    loss: Callable[[int, Tensor], Tensor] = lambda step, loss: loss
    before_step: Callable[[int, nn.Module, Optimizer], Any] = lambda step, model, optimizer: None
    trained: Callable[[nn.Module], Any] = lambda model: model.parameters()


@dataclass(frozen=True)
class Run:
    """One training.

    ``births`` says what NAN-BORN may say of it: how something was born, and in which module, as in
    "module 2.1", or "entry" for any. If it is empty, it may say anything. ``since`` is the step in
    which the fault begins.
    """

    name: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], Optimizer]
    steps: int = 160
    half: torch.dtype | None = None
    criterion: nn.Module | None = field(default_factory=nn.CrossEntropyLoss)
    warmup: int = 0
    clip: float = 0.0
    batch: int = 64
    fault: Fault = Fault()
    births: frozenset[str] = frozenset()
    since: int = 0

    @property
    def data(self) -> str:
        """Which data fit the model."""
        return "sequences" if "transformer" in self.name else "digits"


DATA: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {"digits": _digits, "sequences": _sequences}


def train(run: Run, seed: int) -> Iterator[float]:
    """Train, and give the loss of every step as it is made."""
    torch.manual_seed(seed)
    xs, ys = DATA[run.data]()
    model = run.model()
    run.fault.model(model)
    optimizer = run.optimizer(run.fault.trained(model))
    scaler = torch.amp.GradScaler(
        "cpu", enabled=run.half is torch.float16 and not run.name.endswith("unscaled")
    )
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / (run.warmup or 1))
    )
    for step in range(run.steps):
        chosen = torch.randint(len(xs), (run.batch,))
        x, y = run.fault.inputs(step, xs[chosen]), ys[chosen]
        with torch.autocast("cpu", dtype=run.half) if run.half else nullcontext():
            loss = _loss(run, model(x), x if isinstance(model, Autoencoder) else y)
        loss = run.fault.loss(step, loss)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if run.clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        run.fault.before_step(step, model, optimizer)
        scaler.step(optimizer)
        scaler.update()
        rate.step()
        yield loss.item()


def _loss(run: Run, outputs: Tensor, wanted: Tensor) -> Tensor:
    if run.criterion is not None:
        return run.criterion(outputs.float(), wanted)
    return (
        F.mse_loss(outputs, wanted)
        if outputs.shape == wanted.shape
        else F.cross_entropy(outputs.float(), wanted)
    )
