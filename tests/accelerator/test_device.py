"""The simulated accelerator itself: it computes what the CPU does, and shows what a real card would.

Faults are meant here: the tests of a missing wait and of a missing `record_stream` are programs
with that mistake.
"""

from __future__ import annotations

import copy
import ctypes
import io
import os
import pickle
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from kedge.torch_internals import accelerators

SEEDS = 20


class Residual(nn.Module):
    """A small network as a ResNet has it."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.deep = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        x = F.max_pool2d(F.relu(x + self.deep(x)), 2)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Block(nn.Module):
    """A block of a transformer, with tokens before it and a head behind."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.qkv = nn.Linear(8, 24)
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.wide = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = (
            t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1)
        )
        with sdpa_kernel(SDPBackend.MATH):
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(
                2
            )
        x = x + self.wide(self.second(x))
        return self.head(x).mean(1)


def batches(kind):
    """Three batches for such a model."""
    draw = torch.Generator().manual_seed(7)
    for _ in range(3):
        if kind is Residual:
            yield torch.randn(4, 3, 8, 8, generator=draw), torch.randint(5, (4,), generator=draw)
        else:
            yield torch.randint(11, (3, 6), generator=draw), torch.randint(11, (3,), generator=draw)


def trained(kind, device):
    """The losses and the parameters of three steps of training."""
    torch.manual_seed(1)
    model = kind().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    losses = []
    for x, y in batches(kind):
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return [t.cpu() for t in (*losses, *model.state_dict().values())]


def wrong(sim, program, seeds=200):
    """How many of some seeds give other bits than with no seed at all."""
    with sim.without_delays():
        right = program(True)
    found = 0
    for seed in range(seeds):
        sim.set_seed(seed)
        found += not torch.equal(program(False), right)
    return found


# ---- what it computes


@pytest.mark.parametrize("kind", [Residual, Block])
def test_training_has_the_bits_of_the_cpu(sim, kind):
    """Three steps of training are, whatever the delays, those of the CPU bit for bit."""
    right = trained(kind, "cpu")
    for seed in range(SEEDS):
        sim.set_seed(seed)
        assert all(map(torch.equal, trained(kind, "sim"), right)), seed


OPERATORS = {
    "numbers": lambda x: x * 2 + torch.tensor(3.0),
    "promotion": lambda x: x.long() * 2.5,
    "broadcast": lambda x: x + x[:1],
    "product": lambda x: x @ x.t(),
    "views": lambda x: x.t()[1:].unfold(0, 2, 1).reshape(-1),
    "in place": lambda x: x.clone().t().add_(1).mul_(x.t()),
    "out": lambda x: torch.add(x, x, out=x.new_empty(0)),
    "sort": lambda x: torch.sort(x, dim=1)[0] + torch.argsort(x, 1),
    "gather": lambda x: x.gather(1, x.argsort(1)),
    "mask": lambda x: x[x > 0],
    "put by mask": lambda x: x.clone().masked_fill_(x > 0, 1),
    "put": lambda x: x.index_put((torch.tensor([0, 2], device=x.device),), x[0]),
    "index of the host": lambda x: x[[0, 2]],
    "nonzero": lambda x: (x > 0).nonzero(),
    "unique": lambda x: (x * 2).round().unique(),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "cat": lambda x: torch.cat([x, x.flip(0)]),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x).conj() * 2),
    "fft": lambda x: torch.view_as_real(torch.fft.fft(x)),
    "inverse": lambda x: torch.linalg.inv(x[:, :4]),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.t() + torch.eye(4, device=x.device)),
    "softmax": lambda x: x.softmax(1).log(),
    "bfloat16": lambda x: (x.bfloat16() @ x.t().bfloat16()).float(),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear"),
    "channels last": lambda x: F.conv2d(
        x.expand(2, 3, 4, 6).contiguous(memory_format=torch.channels_last), x.new_ones(2, 3, 2, 2)
    ),
    "transposed convolution": lambda x: F.conv_transpose2d(
        x.expand(1, 2, 4, 6), x.new_ones(2, 3, 2, 2)
    ),
    "ranges": lambda x: (
        torch.arange(0, 1, 0.1, device=x.device) + torch.linspace(0, 1, 10, device=x.device)
    ),
    "one hot": lambda x: F.one_hot(x.argmax(1)),
    "foreach": lambda x: torch.stack(torch._foreach_norm([x, x * 2])),
    "norm": lambda x: F.layer_norm(x, (6,)) + F.instance_norm(x[None])[0],
    "gradient of a gradient": lambda x: torch.func.grad(
        lambda x: torch.func.grad(lambda x: (x**3).sum())(x).sum()
    )(x),
    "vmap": lambda x: torch.func.vmap(torch.dot)(x, x),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_have_the_bits_of_the_cpu(sim, name):
    """An operator gives what it gives on the CPU, with the same dtype, shape and strides."""
    x = torch.randn(4, 6)
    right, found = OPERATORS[name](x), OPERATORS[name](x.to("sim"))
    assert found.device.type == "sim"
    assert (found.dtype, found.stride()) == (right.dtype, right.stride())
    assert torch.equal(found.cpu(), right)


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"fused": True}, {"foreach": False, "amsgrad": True}], ids=str
)
def test_optimizers_have_the_bits_of_the_cpu(sim, options):
    """Adam in each of its forms."""
    models = [nn.Linear(3, 3)]
    models.append(copy.deepcopy(models[0]).to("sim"))
    for model in models:
        optimizer = torch.optim.Adam(model.parameters(), **options)
        for _ in range(2):
            model(torch.ones(2, 3, device=model.weight.device)).pow(2).sum().backward()
            optimizer.step()
    assert all(
        torch.equal(p, q.cpu()) for p, q in zip(*(m.parameters() for m in models), strict=True)
    )


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_networks(sim, kind):
    """Cells are computed from their parts, so only nearly as on the CPU."""
    one = kind(4, 5, 2, batch_first=True)
    two = copy.deepcopy(one).to("sim")
    x = torch.randn(2, 3, 4)
    a, b = one(x)[0], two(x.to("sim"))[0]
    a.sum().backward()
    b.sum().backward()
    torch.testing.assert_close(a, b.cpu())
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad.cpu())


def test_autocast(sim):
    """Products are made in bfloat16, the loss in float32, and gradients have the parameters' dtype."""
    model = nn.Linear(3, 3).to("sim")
    with torch.autocast("sim"):
        out = model(torch.ones(2, 3, device="sim"))
        loss = F.cross_entropy(out, torch.tensor([0, 1], device="sim"))
    loss.backward()
    assert (out.dtype, loss.dtype, model.weight.grad.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )


def test_data_parallel(sim):
    """Both devices compute, and gradients arrive at the first."""
    model = nn.Linear(2, 3).to("sim")
    out = nn.DataParallel(model)(torch.ones(4, 2))
    assert torch.equal(out.cpu(), model(torch.ones(4, 2, device="sim")).cpu())
    assert sim.memory_allocated(1) > 0


# ---- mistakes that it shows


def test_missing_wait_is_seen(sim):
    """A stream that does not wait for another reads what was there before, with some seeds; one that waits never does."""
    side = torch.Stream("sim")

    def program(waits):
        torch.full((1000,), 7.0, device="sim")  # is in the memory before
        x = torch.full((1000,), 3.0, device="sim")
        if waits:
            side.wait_stream(torch.accelerator.current_stream())
        with side:
            y = x * 2
        sim.synchronize()
        x.record_stream(side)
        return y.cpu()

    assert wrong(sim, program) > 0
    assert wrong(sim, lambda waits: program(True)) == 0


def test_missing_record_stream_is_seen(sim):
    """Memory that another stream still reads is given to somebody else, unless that stream was recorded."""
    side = torch.Stream("sim")

    def program(records):
        x = torch.full((1000,), 3.0, device="sim")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            y = torch.zeros(1000, device="sim") + 1
            for _ in range(3):
                y = y * x
        if records:
            x.record_stream(side)
        del x
        z = torch.full((1000,), 5.0, device="sim")  # in the memory of x, if that is free
        sim.synchronize()
        return y.cpu() + z.cpu()

    assert wrong(sim, program) > 0
    assert wrong(sim, lambda records: program(True)) == 0


def test_held_stream_shows_each_mistake_every_time(sim):
    """With a stream held, the memory has its next owner before it is read; recorded, it has not."""
    side = torch.Stream("sim")
    for records in (False, True):
        x = torch.ones(1000, device="sim")
        sim.synchronize()
        with sim.held(side):
            with side:
                y = x * 2
            if records:
                x.record_stream(side)
            del x
            z = torch.empty(1000, device="sim")
            torch.accelerator.current_stream().synchronize()
        sim.synchronize()
        del z
        assert y.isnan().all().item() is not records


def test_missing_wait_of_the_host_is_seen(sim):
    """A copy to pinned memory has not arrived when it was enqueued."""
    x = torch.ones(10, device="sim")
    with sim.held():
        host = x.to("cpu", non_blocking=True)
        assert host.is_pinned()
        assert host.isnan().all()
    sim.synchronize()
    assert torch.equal(host, torch.ones(10))


def test_pinned_memory_that_is_overwritten_too_early_is_seen(sim):
    """A copy from pinned memory reads it when it runs."""
    host = torch.ones(10).pin_memory()
    with sim.held():
        x = host.to("sim", non_blocking=True)
        host.fill_(2)
    assert x.sum().item() == 20


def test_freed_pinned_memory_is_not_reused_before_its_copy(sim):
    """Pinned memory may be let go while a copy from it waits."""
    host = torch.ones(1000).pin_memory()
    with sim.held():
        x = host.to("sim", non_blocking=True)
        del host
        torch.zeros(1000).pin_memory()
    assert x.sum().item() == 1000


def test_host_cannot_read_the_device(sim):
    """Whoever reads a tensor's address ends with a segmentation fault."""
    address = torch.ones(3, device="sim").data_ptr()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(address, 4)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def test_failure_in_a_stream_is_raised_at_the_next_wait(sim):
    """What fails later raises at the first wait after it, once."""
    F.embedding(torch.tensor([9], device="sim"), torch.ones(3, 2, device="sim"))
    with pytest.raises(
        RuntimeError,
        match="sim:0, stream 0: aten::index_select failed after it was enqueued: index out of range",
    ):
        sim.synchronize()
    sim.synchronize()


def test_mistake_that_shapes_show_is_raised_at_once(sim):
    """Shapes that do not fit, or tensors of several devices, raise where they are used."""
    x = torch.ones(3, device="sim")
    with pytest.raises(RuntimeError, match="size"):
        x @ torch.ones(4, device="sim")
    with pytest.raises(RuntimeError, match="found at least two devices, sim:0 and cpu"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="found at least two devices, sim:0 and sim:1"):
        x + torch.ones(3, device="sim:1")


# ---- memory


def test_new_memory_is_poisoned(sim):
    """What was not written is NaN, in memory that was freed, too."""
    x = torch.empty(1000, device="sim")
    assert x.isnan().all()
    address = x.fill_(1).data_ptr()
    del x
    y = torch.empty(1000, device="sim")
    assert y.data_ptr() == address
    assert y.isnan().all()


def test_memory_is_counted_and_limited(sim):
    """Current and peak bytes are those of the tensors; beyond the limit is an error, also after the cache was given back."""
    x = torch.empty(1 << 18, device="sim")
    assert (
        sim.memory_allocated(),
        torch.accelerator.memory_allocated(),
        sim.memory_allocated(1),
    ) == (
        1 << 20,
        1 << 20,
        0,
    )
    del x
    assert (sim.memory_allocated(), sim.max_memory_allocated(), sim.memory_reserved()) == (
        0,
        1 << 20,
        1 << 20,
    )
    sim.set_limit(1 << 21)
    x = torch.empty(3 << 19, device="sim", dtype=torch.uint8)
    assert sim.mem_get_info() == (1 << 19, 1 << 21)
    with pytest.raises(
        torch.OutOfMemoryError,
        match="sim:0 is out of memory: 1048576 bytes were asked for, 524288 of 2097152 are free",
    ):
        torch.empty(1 << 20, device="sim", dtype=torch.uint8)
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == 3 << 19
    del x
    torch.accelerator.empty_cache()
    assert sim.memory_reserved() == 0


def test_storages_grow_and_shrink(sim):
    """A storage that is emptied and filled again is the same to its tensor."""
    x = torch.arange(6.0, device="sim")
    storage = x.untyped_storage()
    storage.resize_(0)
    assert sim.memory_allocated() == 0
    storage.resize_(24)
    x.copy_(torch.arange(6.0))
    assert torch.equal(
        torch.empty(0, device="sim").set_(storage, 1, (2,), (2,)).cpu(), torch.tensor([1.0, 3.0])
    )
    assert torch.equal(x.new_empty(0).resize_(2, 2).fill_(1).cpu(), torch.ones(2, 2))


# ---- streams, events, devices


def test_streams_are_current_as_on_cuda(sim):
    """A stream is current inside its block, and with it its device."""
    before, side = torch.accelerator.current_stream(), torch.Stream("sim:1")
    with side:
        assert torch.accelerator.current_stream() == side
        assert torch.ones(1, device="sim").device == torch.device("sim:1")
    assert (torch.accelerator.current_stream(), torch.accelerator.current_device_index()) == (
        before,
        0,
    )
    assert before == sim.default_stream()
    torch.accelerator.set_stream(torch.Stream("sim"))
    assert torch.accelerator.current_stream() != before
    assert (torch.accelerator.current_accelerator(), torch.accelerator.device_count()) == (
        torch.device("sim"),
        2,
    )


def test_events(sim):
    """An event is passed when its stream has come to it, and two of them give the time between."""
    first, last = (torch.Event("sim", enable_timing=True) for _ in range(2))
    assert first.query()
    with sim.held():
        first.record()
        torch.ones(3, device="sim")
        last.record()
        assert not last.query()
        assert not torch.accelerator.current_stream().query()
    last.synchronize()
    assert last.query()
    assert 0 < first.elapsed_time(last) < 10_000
    assert sim.counts()["syncs"]["event"] == 1


def test_copies_between_devices_wait_for_both(sim):
    """A copy to the other device comes after what both devices' streams had to do, and before what they do next."""
    for seed in range(SEEDS):
        sim.set_seed(seed)
        x = torch.full((1000,), float(seed), device="sim:0")
        y = torch.zeros(1000, device="sim:1")
        y.copy_(x)
        x.fill_(-1)
        assert torch.equal((y + 1).cpu(), torch.full((1000,), seed + 1.0))


def test_backward_runs_in_the_streams_of_the_forward(sim):
    """Autograd's thread enqueues in the forward's stream, and waits between streams by itself."""
    side = torch.Stream("sim")
    weight = torch.ones(5, device="sim", requires_grad=True)
    for seed in range(SEEDS):
        sim.set_seed(seed)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            y = (weight * 3).sum()
        torch.accelerator.current_stream().wait_stream(side)
        y.backward()
        assert torch.equal(weight.grad.cpu(), torch.full((5,), 3.0))
        weight.grad = None


# ---- counts


def test_waits_and_copies_are_counted(sim):
    """Each wait of the host is counted by its kind, each copy by its direction with its bytes."""
    x = torch.ones(4).to("sim")
    x.sum().item()
    x.nonzero()
    x.clone()
    x.to("sim:1")
    x.cpu()
    sim.synchronize()
    torch.accelerator.current_stream().synchronize()
    counts = sim.counts()
    assert counts["syncs"] == {
        "stream": 1,
        "device": 1,
        "event": 0,
        "read": 1,
        "copy": 2,
        "op": 1,
        "allocator": 0,
    }
    assert counts["synchronizing_ops"] == {"aten::nonzero": 1}
    assert counts["copies"] == {"h2d": (1, 16), "d2h": (2, 20), "d2d": (1, 16), "p2p": (1, 16)}
    sim.reset_counts()
    assert sim.counts()["kernels"] == 0


def test_training_step_waits_for_nothing(sim):
    """Forward, backward and an optimizer's step enqueue all they do."""
    model = Block().to("sim")
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = (t.to("sim") for t in next(batches(Block)))
    for _ in range(2):
        sim.reset_counts()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert sum(sim.counts()["syncs"].values()) == 0
        assert sim.counts()["kernels"] > 50


def test_place_of_a_wait_is_reported(sim):
    """While traced, the stack of each wait is noted."""
    x = torch.ones(1, device="sim")
    with sim.traced():
        x.item()
    [(kind, _, stack)] = sim.counts()["where"]
    assert kind == "read"
    assert "test_place_of_a_wait_is_reported" in stack


def test_thread_cannot_wait_for_what_it_holds(sim):
    """To wait for a stream inside its block is an error, not a test that never ends."""
    with sim.held(), pytest.raises(RuntimeError, match="waits for a stream that it holds itself"):
        torch.ones(1, device="sim").item()


# ---- random numbers


def test_random_numbers_depend_on_the_seed_alone(sim):
    """The same seed gives the same numbers, whatever the delays; the CPU's generator is not touched."""
    drawn = []
    before = torch.get_rng_state()
    for seed in range(SEEDS):
        sim.set_seed(seed)
        sim.manual_seed_all(3)
        x = F.dropout(torch.randn(100, device="sim"), 0.3)
        drawn.append(
            torch.cat([x, torch.randperm(9, device="sim"), torch.bernoulli(x.sigmoid())]).cpu()
        )
    assert all(torch.equal(d, drawn[0]) for d in drawn)
    assert torch.equal(torch.get_rng_state(), before)


def test_state_of_the_generator(sim):
    """It is 16 bytes, can be put back, and `fork_rng` does."""
    torch.manual_seed(3)
    state = torch.sim.get_rng_state()
    assert state.shape == (16,)
    first = torch.rand(4, device="sim").cpu()
    assert not torch.equal(torch.rand(4, device="sim").cpu(), first)
    torch.sim.set_rng_state(state)
    with torch.random.fork_rng(range(2), device_type="sim"):
        torch.rand(4, device="sim")
    assert torch.equal(torch.rand(4, device="sim").cpu(), first)
    generator = torch.Generator("sim").manual_seed(3)
    assert torch.equal(torch.rand(4, device="sim", generator=generator).cpu(), first)


def test_checkpoint_draws_again_what_it_drew(sim):
    """Dropout in a checkpoint has one mask."""
    x, y = (torch.ones(50, device="sim", requires_grad=True) for _ in range(2))
    for leaf, run in ((x, lambda x: checkpoint(F.dropout, x, use_reentrant=False)), (y, F.dropout)):
        torch.manual_seed(1)
        run(leaf).sum().backward()
    assert torch.equal(x.grad.cpu(), y.grad.cpu())


# ---- the rest of PyTorch


def test_tensors_are_copied_saved_and_loaded(sim):
    """Tensors keep their device, or get the one that they are mapped to."""
    x = torch.arange(3.0, device="sim:1")
    file = io.BytesIO()
    torch.save({"x": x}, file)
    for location, device in ((None, "sim:1"), ("cpu", "cpu"), ("sim:0", "sim:0")):
        file.seek(0)
        loaded = torch.load(file, map_location=location)["x"]
        assert loaded.device == torch.device(device)
        assert torch.equal(loaded.cpu(), x.cpu())
    for twin in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert twin.device == x.device
        assert torch.equal(twin.cpu(), x.cpu())


def test_data_loader_pins(sim):
    """A loader's batches are in pinned memory."""
    for (batch,) in DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2, pin_memory=True):
        assert batch.is_pinned()
        assert not torch.ones(1).is_pinned()


def test_device_is_initialized_once_it_is_used(sim):
    """As CUDA's: not by a question about it or a seed, but by the first tensor; and then there is a generator to save."""
    torch.manual_seed(3)
    assert (sim.is_available(), sim.device_count(), accelerators.in_use()) == (True, 2, None)
    assert (sim.is_initialized(), sim._initialized) == (False, False)
    x = torch.ones(1, device="sim:1")
    assert (sim.is_initialized(), sim._initialized, accelerators.in_use()) == (True, True, "sim")
    assert x.item() == 1


def test_setting_a_device_initializes(sim):
    """Before there is any tensor on it."""
    sim.set_device(1)
    assert sim.is_initialized()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.float32])
def test_histograms_are_of_integers_too(sim, dtype):
    """A card has the kernel that the CPU lacks; nothing waits for it."""
    x = torch.tensor([0, 3, 3, 1, 7, 3], dtype=dtype)
    sim.reset_counts()
    found = torch.histc(x.to("sim", non_blocking=True), bins=4, min=0, max=3)
    assert sim.counts()["syncs"] | {"copy": 0} == dict.fromkeys(sim.counts()["syncs"], 0)
    assert found.dtype == dtype
    assert found.tolist() == [1, 1, 0, 3]


def test_fork_cannot_use_the_device(sim):
    """In a fork the device is as dead as CUDA is there, and tensors can be freed."""
    x = torch.ones(3, device="sim")
    sim.synchronize()
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            x + 1
        except RuntimeError as error:
            os.write(write, str(error).encode())
        del x
        os._exit(0)
    os.wait()
    assert b"sim was used before this process was forked" in os.read(read, 1000)
