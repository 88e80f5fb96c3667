"""The tutorials' uses of saved-tensor hooks, as offloads: to the CPU, to disk, for a model, a module, and large tensors only."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kedge

pytestmark = pytest.mark.filterwarnings(
    "ignore::kedge.errors.NothingGained"
)  # the tensors are in CPU memory already
DESTINATIONS = {
    "rebuild": kedge.Rebuild(),
    "cpu": kedge.Cpu(),
    "disk": kedge.Disk(),
    "disk alone": kedge.Disk(rebuild=False),
    "checked": kedge.Disk(checksum=True),
    "uncached": kedge.Disk(uncached=True),
}
everywhere = pytest.mark.parametrize("to", DESTINATIONS.values(), ids=DESTINATIONS)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)), inplace=True)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.drop, self.fc = nn.Dropout(0.3), nn.Linear(4, 3)

    def forward(self, x, call=lambda block, x: block(x)):
        for block in self.blocks:
            x = call(block, x)
        return self.fc(self.drop(F.gelu(F.max_pool2d(x, 2)).mean((2, 3))))


X = torch.linspace(-2, 2, 2 * 4 * 12 * 12).view(2, 4, 12, 12)
CALLS = {
    "plain": lambda block, x: block(x),
    "checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
}


def train(model, run=None, steps=3):
    """Train a few steps; return the gradients of the last and the weights."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        (run or (lambda x: model(x)))(X.clone().requires_grad_()).pow(2).sum().backward()
        optimizer.step()
    return [param.grad for param in model.parameters()] + [
        value.clone() for value in model.state_dict().values()
    ]


def small():
    """Make the model, the same each time."""
    torch.manual_seed(0)
    return Small()


@everywhere
def test_a_whole_model(to):
    """S4, S5: offloading a whole model changes no bit of a training, and the account says what went where."""
    plain = train(small())
    model = small()
    with kedge.offload(model, to=to, min_bytes=64) as account:
        assert all(map(torch.equal, plain, train(model)))
    total = account.total
    assert bool(total.moved) is isinstance(to, kedge.Disk)
    assert bool(total.rebuilt) is getattr(to, "rebuild", True)
    assert account.steps == 2


@everywhere
def test_one_module(to):
    """S4, S5: one module is offloaded by wrapping its calls, and by naming it."""
    plain = train(small())
    model = small()
    wrapped = kedge.offload(model.blocks[1], to=to, min_bytes=64)
    blocks = {model.blocks[1]: wrapped}
    assert all(
        map(
            torch.equal,
            plain,
            train(model, lambda x: model(x, lambda block, x: blocks.get(block, block)(x))),
        )
    )
    assert set(wrapped.account.rows) == {"", "conv", "norm"}

    model = small()
    with kedge.offload(model, "blocks.1.**", to=to, min_bytes=64) as account:
        assert all(map(torch.equal, plain, train(model)))
    taken = [
        path for path in account.rows if account.module(path).moved or account.module(path).rebuilt
    ]
    assert all(path.startswith("blocks.1") for path in taken)


def test_only_large_tensors():
    """S4: tensors of a thousand elements and more; the smaller ones stay, and the account counts them."""
    model = small()
    with kedge.offload(model, to=kedge.Disk(rebuild=False), min_bytes=4000) as account:
        train(model)
    moved = account.total.moved["disk"]
    assert moved.bytes >= 4000 * moved.number > 0
    assert account.total.small.number


@pytest.mark.parametrize("call", CALLS)
@everywhere
def test_inside_and_around_checkpoints(to, call):
    """Blocks that are checkpointed, in both ways, give the same bits with an offload around them."""
    plain = small()
    expected = train(plain, lambda x: plain(x, CALLS[call]))
    model = small()
    with kedge.offload(model, to=to, min_bytes=64):
        assert all(map(torch.equal, expected, train(model, lambda x: model(x, CALLS[call]))))


@everywhere
def test_inside_a_checkpoint(to):
    """A module whose calls are wrapped, within a checkpoint, gives the same bits."""
    expected = train(small())
    model = small()
    wrapped = {block: kedge.offload(block, to=to, min_bytes=64) for block in model.blocks}
    call = lambda block, x: checkpoint(wrapped[block], x, use_reentrant=False)
    found = train(model, lambda x: model(x, call))

    names = list(dict(model.named_parameters()))
    for name, a, b in zip(
        names, expected, found, strict=False
    ):  # batch norm counts a recompute as another batch
        assert torch.equal(a, b), name


@everywhere
def test_save_on_cpu_inside_and_around(to):
    """PyTorch's own `save_on_cpu`, inside the block or around it, and Kedge's give the same bits together."""
    plain = train(small())
    model = small()
    with kedge.offload(model, to=to, min_bytes=64), save_on_cpu():
        assert all(map(torch.equal, plain, train(model)))
    model = small()
    with save_on_cpu(), kedge.offload(model, to=to, min_bytes=64):
        assert all(map(torch.equal, plain, train(model)))


def _open_files():
    """Count this process's file descriptors, where the system tells."""
    listed = Path("/proc/self/fd")
    return len(list(listed.iterdir())) if listed.is_dir() else 0


def test_no_file_is_left(tmp_path):
    """S5: after success, an exception, and an abandoned graph the folder is empty, and no descriptor is open."""
    before = _open_files()
    model = small()
    with kedge.offload(model, to=kedge.Disk(tmp_path), min_bytes=64):
        train(model)
        abandoned = model(X)
        del abandoned
    with (
        pytest.raises(ZeroDivisionError),
        kedge.offload(model, to=kedge.Disk(tmp_path), min_bytes=64),
    ):
        y = model(X)
        1 / 0
    del y
    assert list(tmp_path.iterdir()) == []
    after = _open_files()
    assert after == before


@pytest.mark.parametrize("codec", ["bf16", "fp8", "int8"])
@everywhere
def test_a_lossy_codec_trains_nearly_the_same(to, codec):
    """With a codec gradients are close, and bytes are fewer."""
    plain = small()
    F.cross_entropy(plain.eval()(X), torch.tensor([0, 2])).backward()
    model = small()
    with kedge.offload(model, to=to, min_bytes=64, codec=codec) as account:
        F.cross_entropy(model.eval()(X), torch.tensor([0, 2])).backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 0.1 * a.grad.norm() + 1e-6
    assert account.total.stored.bytes < account.total.sum("moved").bytes


def test_the_saving_of_the_headline_at_far_less_time():
    """S7: of what a ResNet-152 saves at most 5 of 48 parts stay, with equal gradients, and a step takes less than 6 times as long.

    On a CPU, with a file and layers so narrow that what each tensor costs weighs most; how much
    less time it takes at full size, also on a GPU and beside `save_on_cpu`, is measured by
    ``benchmarks/offload.py`` and ``benchmarks/gpu.py``.
    """
    transformers = pytest.importorskip("transformers")
    depths, widths = [3, 8, 36, 3], [32, 64, 128, 256]
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=widths, depths=depths, num_labels=5
    )
    model, x, y = (
        transformers.ResNetForImageClassification(config),
        torch.randn(32, 3, 48, 48),
        torch.arange(32) % 5,
    )
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def steps():
        """Make two steps; return the gradients of the last, and the processor's time of the faster one."""
        model.load_state_dict(start)
        seconds = []
        for _ in range(2):
            model.zero_grad()
            begun = time.process_time()
            F.cross_entropy(model(x).logits, y).backward()
            seconds.append(time.process_time() - begun)
        return [param.grad for param in model.parameters()], min(seconds)

    plain, bare = steps()
    with kedge.offload(model, to=kedge.Disk(), min_bytes=1024) as account:
        offloaded, seconds = steps()

    assert all(map(torch.equal, plain, offloaded))
    total = account.total
    stays = total.sum("kept").bytes - total.resident + total.extra
    assert stays <= (total.unique.bytes - total.resident) * 5 / 48
    assert seconds < 6 * bare
