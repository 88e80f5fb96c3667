"""What can only be seen on a device of its own: copies beside the computation are right, and free memory."""

import gc
import weakref

import pytest
import torch
from torch import nn

import kedge
from kedge.hooks.placing.stand_in import around_of
from kedge.offload.plan.link import measured
from kedge.offload.stores.cpu import CpuStore
from kedge.torch_internals import accelerators
from tests.marks import DEVICE, needs_cuda, needs_device

pytestmark = needs_device

GPU = None if DEVICE is None else torch.device(DEVICE.type, 0)


class Residual(nn.Module):
    """A block of a residual network."""

    def __init__(self, width):
        super().__init__()
        self.conv1, self.norm1 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.conv2, self.norm2 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        inner = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return self.relu(x + inner)


class Layer(nn.Module):
    """A layer of a transformer, with dropout."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.attn = (
            nn.LayerNorm(width),
            nn.MultiheadAttention(width, 8, dropout=0.1, batch_first=True),
        )
        self.norm2, self.mlp = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
        )

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


@pytest.fixture(autouse=True)
def deterministic():
    """Make cuDNN and cuBLAS compute the same bits each time, so that gradients can be compared."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def cnn():
    """A small residual network, and images."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *[Residual(64) for _ in range(8)]).to(GPU)
    return model, torch.randn(16, 3, 64, 64, device=GPU)


def transformer():
    """A small transformer, and hidden states."""
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(512) for _ in range(6)]).to(GPU), torch.randn(
        8, 512, 512, device=GPU
    )


def gradients(model, x, steps=1):
    """The gradients of the last of a few steps."""
    for _ in range(steps):
        model.zero_grad()
        torch.manual_seed(1)
        model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def state(model):
    """The buffers, which a step changes."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def peak(model, x):
    """The most memory that a step takes above what there is before it."""
    gradients(model, x)
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    gradients(model, x)
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated() - before


MODELS = {"cnn": cnn, "transformer": transformer}
TO = {
    "move": kedge.Cpu(rebuild=False),
    "move, unpinned": kedge.Cpu(rebuild=False, pin=False),
    "both": kedge.Cpu(),
    "rebuild": kedge.Rebuild(),
    "disk": kedge.Disk(),
}


@pytest.mark.parametrize("to", TO)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_equal_to_the_last_bit(model, to):
    """Step after step, with the order learned and memory reused, gradients are those of the plain model."""
    model, x = MODELS[model]()
    start = state(model)
    plain = gradients(model, x, steps=4)
    model.load_state_dict(start, strict=False)
    with kedge.offload(model, to=TO[to]):
        offloaded = gradients(model, x, steps=4)

    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))


def test_gradients_are_equal_in_channels_last_and_bf16():
    """Strides are kept, and so are the casts of autocast."""
    model, x = cnn()
    model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    start = state(model)
    with torch.autocast(GPU.type, dtype=torch.bfloat16):
        plain = gradients(model, x, steps=3)
        model.load_state_dict(start, strict=False)
        with kedge.offload(model, to=kedge.Cpu()):
            offloaded = gradients(model, x, steps=3)

    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_moving_frees_the_device(model, monkeypatch):
    """With a small window, a step that moves all takes less than half of the memory of the plain step."""
    monkeypatch.setattr(
        CpuStore.__init__,
        "__kwdefaults__",
        {**CpuStore.__init__.__kwdefaults__, "window": 16 << 20},
    )
    model, x = MODELS[model]()
    plain = peak(model, x)
    with kedge.offload(model, to=kedge.Cpu()):
        moved = peak(model, x)

    assert moved < plain / 2


def test_a_store_copies_right_under_load():
    """Random work on the device between puts and gets, tensors freed at once: each get gives what was put."""
    store = CpuStore(window=32 << 20)
    work = torch.randn(2048, 2048, device=GPU)
    for step in range(6):
        slots = []
        for i in range(40):
            source = torch.full((1 << 20,), (7 * step + i) % 251, dtype=torch.uint8, device=GPU)
            slots.append((store.put(source), (7 * step + i) % 251))
            del source
            work = work @ work / work.norm()
            torch.full(
                (1 << 20,), 252, dtype=torch.uint8, device=GPU
            )  # wants the memory that was just freed
        right = []
        for slot, value in reversed(slots):
            back = slot.get()
            right.append((back == value).all())
            back.fill_(253)
            del back
            work = work @ work / work.norm()
            slot.free()
        assert bool(torch.stack(right).all())
    store.close()
    assert store.pinned == 0


def test_a_get_on_another_stream_is_right():
    """A backward on a stream of its own gets the bytes, also those that were read ahead on another one."""
    store = CpuStore()
    slots = [store.put(torch.full((1 << 22,), i, dtype=torch.uint8, device=GPU)) for i in range(8)]
    torch.accelerator.synchronize()
    slots[7].get()  # reads the others ahead, on this stream
    side = torch.Stream(GPU)
    with accelerators.on(side):
        right = [(slot.get() == i).all() for i, slot in reversed(list(enumerate(slots)))]
    side.synchronize()

    assert all(bool(each) for each in right)
    for slot in slots:
        slot.free()
    store.close()


@needs_cuda
def test_host_memory_is_pinned_by_the_byte():
    """What is taken is what is needed, in blocks, and PyTorch knows that it is pinned."""
    store = CpuStore()
    slot = store.put(torch.zeros((65 << 20) + 1, dtype=torch.uint8, device=GPU))

    assert slot.place.host.is_pinned()
    assert (65 << 20) < store.pinned < (66 << 20)
    slot.free()
    store.close()


@needs_cuda
def test_memory_that_is_registered_twice_is_no_later_error():
    """A failure to pin is reported and cleared: the next kernel does not raise it."""
    store = CpuStore()
    slot = store.put(torch.zeros(1 << 20, dtype=torch.uint8, device=GPU))
    host = slot.place.block.host
    failed = store._device.pin(host.data_ptr(), host.numel())

    assert failed
    assert float(torch.ones(3, device=GPU).sum()) == 3
    slot.free()
    store.close()


@needs_cuda
def test_a_graph_that_is_captured_keeps_its_tensors():
    """What is saved while a CUDA graph is captured stays where it is, with a warning, and replays right."""
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).to(GPU)
    x = torch.randn(256, 512, device=GPU)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with (
        kedge.offload(model, to=kedge.Cpu(rebuild=False)),
        pytest.warns(kedge.errors.OffloadFailed, match="graph"),
    ):
        with torch.cuda.graph(graph):
            model(x).square().mean().backward()
    graph.replay()
    captured = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()

    assert all(
        torch.allclose(a, p.grad, rtol=1e-4, atol=1e-6)
        for a, p in zip(captured, model.parameters(), strict=True)
    )


@pytest.mark.parametrize("codec", ["bf16", "fp8", "int8"])
def test_codecs_are_the_same_on_both_devices(codec):
    """What a codec makes on a GPU is what it makes on a CPU, NaN and infinities too."""
    from kedge.offload.codecs import codec_of

    value = torch.randn(1 << 18)
    value[[3, 700, 90_000]] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    both = []
    for device in ("cpu", GPU):
        kept, extra = codec_of(codec).encode(value.to(device))
        both.append(codec_of(codec).decode(kept, extra).cpu())

    assert torch.allclose(both[0], both[1], rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("codec", ["bf16", "fp8", "int8"])
def test_codecs_train(codec):
    """With a codec the gradients are close to those without."""
    model, x = transformer()
    plain = gradients(model, x)
    with kedge.offload(model, to=kedge.Cpu(), codec=codec):
        coded = gradients(model, x, steps=2)
    errors = [
        float((a - b).norm() / a.norm().clamp(min=1e-6)) for a, b in zip(plain, coded, strict=True)
    ]

    assert max(errors) < 0.3


def test_the_link_is_measured():
    """Both directions have a rate that a link can have."""
    store = CpuStore()
    link = measured(store, GPU)
    store.close()

    assert 1e8 < link.write < 1e12
    assert 1e8 < link.read < 1e12
    assert link.overlaps


def test_a_limit_of_memory_is_kept():
    """A plan for 40 % of what is saved keeps to it, as the allocator sees it, and gradients keep their bits."""
    model, x = cnn()
    start = state(model)
    plain_peak, plain = peak(model, x), None
    model.load_state_dict(start, strict=False)
    plain = gradients(model, x, steps=6)
    model.load_state_dict(start, strict=False)
    with kedge.offload(model, to=kedge.Cpu(), max_memory=int(0.4 * plain_peak)) as account:
        planned = gradients(model, x, steps=4)
        planned = gradients(model, x, steps=2)

    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))
    assert account.plan
    print(account.plan)  # noqa: T201 - shown with -s


def test_nothing_stays():
    """After the block, and after an abandoned graph, the device and the host have their memory back."""
    model, x = transformer()
    gradients(model, x)
    gc.collect()
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    offload = kedge.offload(model, to=kedge.Cpu())
    with offload:
        gradients(model, x)
        loss = model(x).sum()  # its backward never runs
        store = weakref.ref(around_of(offload)._store)
        del loss
    del offload
    gc.collect()
    torch.accelerator.synchronize()

    assert torch.accelerator.memory_allocated() <= before + (1 << 20)
    assert store() is None
