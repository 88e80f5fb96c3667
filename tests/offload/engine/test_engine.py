"""What is done with which saved tensor, and what the account says of it."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.errors import NoSiteMatched, NothingGained, OffloadError, OffloadFailed, RebuiltWrong
from kedge.offload.engine.policy import Choice
from kedge.offload.rebuild import find
from tests.offload.engines import Save, Shelf, engaged


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(20, 40)
        self.act = nn.GELU()
        self.inner = nn.Sequential(nn.Linear(40, 40), nn.ReLU())
        self.register_buffer("mask", torch.ones(40))

    def forward(self, x):
        return self.inner(self.act(self.first(x)) * self.mask).sin()


@pytest.fixture
def net():
    """A model with all that is kept anyhow."""
    torch.manual_seed(0)
    return Net()


X = torch.linspace(-1, 1, 160).view(8, 20)


def grads_of(model, times=1):
    """Return the gradients of some steps."""
    model.zero_grad()
    for _ in range(times):
        model(X).pow(2).sum().backward()
    return [param.grad.clone() for param in model.parameters()]


@pytest.mark.parametrize(
    "to",
    [
        kedge.Rebuild(),
        kedge.Disk(),
        kedge.Disk(rebuild=False),
        kedge.Disk(checksum=True),
        kedge.Disk(uncached=True),
    ],
)
def test_gradients_are_equal_to_the_last_bit(net, to):
    """Without a codec, offloading changes no bit of a gradient, in any step."""
    plain = grads_of(net, 3)
    with kedge.offload(net, to=to, min_bytes=64) as account:
        assert all(map(torch.equal, plain, grads_of(net, 3)))
    assert account.steps == 2
    assert account.total.rebuilt or account.total.moved


def test_parameters_buffers_and_inputs_stay(net):
    """What the program holds anyhow is known by its storage - a weight that is saved transposed, too - and never moved."""
    x = X.clone()
    shelf = Shelf()
    with engaged(net, shelf) as engine:
        net(x).sum().backward()

    kept = engine.account.total.kept
    assert kept["parameter"].bytes == net.inner[0].weight.nbytes
    assert kept["buffer"].bytes == net.mask.nbytes
    assert kept["input"].bytes == x.nbytes
    assert set(kept) == {"parameter", "buffer", "input"}
    assert shelf.sizes == [8 * 40 * 4] * 3  # gelu's input, its output times the mask, relu's output


def test_replaced_storages_are_known_at_the_next_call(net):
    """Parameters that were given other memory between two calls are still known."""
    shelf = Shelf()
    with engaged(net, shelf) as engine:
        net(X).sum()
        for param in net.parameters():
            param.data = param.data.clone()
        net(X).sum()

    assert engine.account.total.kept["parameter"].bytes == 2 * net.inner[0].weight.nbytes


def test_a_parameter_that_is_no_model_s_stays():
    """A leaf of the graph is held by the program, or by FSDP; it and its views are not moved."""
    shelf = Shelf()
    weight = nn.Parameter(torch.ones(30, 30))
    with engaged(shelf=shelf) as engine:
        (X[:, :1].expand(8, 30).clone() @ weight.t()).sum().backward()

    assert (
        engine.account.total.kept["parameter"].number == 0
    )  # the input needs no gradient, so the weight is not saved
    with engaged(shelf=shelf) as engine:
        ((torch.ones(8, 30, requires_grad=True) * 2) @ weight.t()).sum().backward()
    assert engine.account.total.kept["parameter"].bytes == weight.nbytes


def test_what_is_small_stays(net):
    """What has fewer bytes than `min_bytes` is kept, and counted."""
    with kedge.offload(net, to=kedge.Disk(rebuild=False), min_bytes=8 * 40 * 4 + 1) as account:
        grads_of(net)

    assert not account.total.moved
    assert account.total.small.bytes > 3 * 8 * 40 * 4


def test_only_what_is_selected_is_taken(net):
    """With a selector, what is saved while another module is the innermost one stays, and outside of all modules too."""
    with kedge.offload(net, "inner.**", to=kedge.Disk(rebuild=False), min_bytes=64) as account:
        net(X).sin().sum().backward()

    moved = {path for path in account.rows if account.module(path).moved}
    assert moved == {"inner.0", "inner.1"}
    assert {path for path in account.rows if account.module(path).kept["excluded"].number} == {
        "first",
        "act",
        "",
        None,
    }


def test_everything_includes_what_is_saved_outside(net):
    """Without a selector, a functional loss outside of the model is offloaded too."""
    with kedge.offload(net, to=kedge.Disk(rebuild=False), min_bytes=64) as account:
        F.softmax(net(X), dim=1).sum().backward()

    assert account.module(None).moved["disk"].number == 1
    assert "(outside)" in str(account)


class Stranger(torch.Tensor):
    pass


def strange():
    """Yield programs that save what is not a plain tensor."""
    w = torch.ones(8, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both are in beta
        yield "sparse", lambda: torch.sparse.mm(torch.eye(8).to_sparse(), w[:, None] * 1).sum()
        yield "csr", lambda: (torch.eye(8).to_sparse_csr() @ (w[:, None] * 1)).sum()
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True)
        yield "nested", lambda: torch.nested.to_padded_tensor(nested * nested, 0.0).sum()
    yield "wrapper", lambda: Save.apply(w, TwoTensor(torch.ones(8), torch.ones(8))).sum()
    yield (
        "subclass",
        lambda: (w * torch.ones(8).as_subclass(Stranger)).as_subclass(torch.Tensor).sum(),
    )


@pytest.mark.parametrize(("kind", "program"), list(strange()))
def test_what_is_not_known_stays(kind, program):
    """Sparse and nested tensors and subclasses are kept by reference, and backward runs."""
    with engaged(shelf=Shelf()) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program().backward()

    assert engine.account.total.kept["unknown"].number


@pytest.mark.filterwarnings("ignore::kedge.errors.SavedAside")
def test_fake_tensors_are_left_alone():
    """Inside a `FakeTensorMode` nothing is moved."""
    shelf = Shelf()
    with engaged(shelf=shelf), FakeTensorMode():
        y = (torch.ones(8, requires_grad=True) * 2).sin().sum()
        y.backward()
    assert shelf.slots == []


@pytest.mark.parametrize("full", [OSError, MemoryError, torch.OutOfMemoryError])
def test_a_full_store_keeps_and_says_so_once(net, full):
    """What cannot be moved is kept by reference: gradients are equal, a warning says so once, the account each time."""
    plain = grads_of(net, 2)
    with engaged(net, Shelf(full=full)) as engine:
        with pytest.warns(OffloadFailed, match="the shelf is full") as warned:
            offloaded = grads_of(net, 2)
    assert all(map(torch.equal, plain, offloaded))
    assert len(warned) == 1
    total = engine.account.total
    assert total.failed.number == total.kept["failed"].number == 8  # four a step
    assert total.again.number == 2  # one of which is saved twice
    assert "8 tensors" in str(engine.account)


def test_what_cannot_be_read_raises(net):
    """An error while bytes are brought back comes out of `backward` as it is; the next step is not touched by it."""
    plain, shelf = grads_of(net), Shelf()
    with engaged(net, shelf):
        loss = net(X).pow(2).sum()
        shelf.unreadable = True
        with pytest.raises(OSError, match="the shelf cannot be read"):
            loss.backward()
        del loss
        shelf.unreadable = False
        assert all(map(torch.equal, plain, grads_of(net)))
    assert shelf.freed == len(shelf.slots)


def test_other_errors_of_a_store_come_out_of_forward(net):
    """What is not a lack of room is a mistake, and no reason to go on."""
    with engaged(net, Shelf(full=ZeroDivisionError)), pytest.raises(ZeroDivisionError):
        net(X)
    assert all(map(torch.equal, grads_of(net), grads_of(net)))


def lying(how, run=None):
    """For the output of GELU, find a wrong recipe, or one that runs as it is told."""

    def wrong(x):
        made = F.gelu(x)
        return {
            "values": made + 1e-6,
            "dtype": made.double(),
            "strides": torch.empty_strided(made.shape, (1, made.shape[0])).copy_(made),
        }[how]

    def found(value, handle_of):
        if value.grad_fn is None or value.grad_fn.name() != "GeluBackward0":
            return None
        handle = handle_of(value.grad_fn._raw_saved_self)
        return SimpleNamespace(rule="lie", inputs=(handle,), extra=None, nbytes=0, run=run or wrong)

    return found


def test_a_rule_that_fails_is_left_out_there_alone():
    """One that raises is not used at that place any more; one for which there was no memory is tried again in the next step."""
    for failure, rebuilt in (
        (ValueError("no"), 3),
        (MemoryError("full"), 5),
        (RuntimeError("x can't allocate memory: y"), 5),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(20, 40), nn.GELU(), nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 40)
        )
        plain = grads_of(model, 3)
        raising = [failure]

        def run(x, raising=raising):
            if raising:
                raise raising.pop()
            return F.gelu(x)

        with engaged(model, find=lying("", run)) as engine:
            assert all(map(torch.equal, plain, grads_of(model, 3)))
        assert engine.account.total.rebuilt["lie"].number == rebuilt
        assert "in '2' alone: it raised" in str(engine.account)


@pytest.mark.parametrize("how", ["values", "dtype", "strides"])
def test_a_rule_that_is_wrong_is_dropped(how):
    """Each rule is compared with the truth where it is first used; one that fails is not used, and the account says why."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.GELU(), nn.Linear(40, 40))
    plain = grads_of(model, 2)
    with engaged(model, find=lying(how)) as engine:
        assert all(map(torch.equal, plain, grads_of(model, 2)))
    assert not engine.account.total.rebuilt
    assert "rule lie is not used: torch.float32 on cpu, in '2': it " in str(engine.account)


def test_a_rule_is_verified_once_at_each_place():
    """What a rule makes is compared with the truth at each place where it is used, in the first step that comes there."""
    runs = []

    def found(value, handle_of):
        recipe = find(value, handle_of)
        if recipe is None:
            return None
        counted = lambda *given: runs.append(1) or recipe.run(*given)
        return SimpleNamespace(
            rule="r", inputs=recipe.inputs, extra=recipe.extra, nbytes=recipe.nbytes, run=counted
        )

    model = nn.Sequential(
        *(layer for _ in range(5) for layer in (nn.Linear(20, 20), nn.GELU())), nn.Linear(20, 20)
    )
    with engaged(model, find=found) as engine:
        kept = model(X), model(X)
    assert len(runs) == 5
    assert engine.account.total.rebuilt["r"].number == 10
    assert kept


class Alternating:
    """A planner that does everything in turn."""

    shown = None

    def __init__(self, *choices):
        self.choices, self.asked, self.took_what, self.turns = choices, [], [], 0

    def choose(self, path, index, nbytes):
        self.asked.append((path, index, nbytes))
        return self.choices[(len(self.asked) - 1) % len(self.choices)]

    def took(self, outcome):
        self.took_what.append((outcome.group, outcome.name))

    def turn(self, account):
        self.turns += 1


@pytest.mark.parametrize("choice", Choice)
def test_a_planner_is_obeyed(net, choice):
    """What a planner chooses is done, if it can be; otherwise the tensor is kept.

    It is asked again in the next step.
    """
    plain, planner, shelf = grads_of(net, 2), Alternating(choice), Shelf()
    with engaged(net, shelf, find=find, planner=planner) as engine:
        assert all(map(torch.equal, plain, grads_of(net, 2)))

    total = engine.account.total
    assert bool(total.rebuilt) is (choice in (Choice.REBUILD, Choice.ALL))
    assert bool(shelf.slots) is (choice in (Choice.MOVE, Choice.COMPRESS, Choice.ALL))
    assert planner.turns == 1
    assert planner.asked[: len(planner.asked) // 2] == planner.asked[len(planner.asked) // 2 :]
    assert len(planner.took_what) == len(planner.asked)
    if choice is Choice.KEEP:
        assert set(planner.took_what) == {("kept", "planned")}


@pytest.mark.parametrize(
    ("choice", "takes", "why"),
    [(Choice.REBUILD, True, "no rule"), (Choice.MOVE, True, ""), (Choice.MOVE, False, "here")],
    ids=["no rule fits", "moved", "on the store's own device"],
)
def test_the_account_says_why_a_choice_was_not_carried_out(net, choice, takes, why):
    """A tensor stays that no rule rebuilds, or that is where the store would put it."""
    shelf = Shelf()
    shelf.takes = lambda device: takes
    with engaged(net, shelf, find=lambda *_: None, planner=Alternating(choice)) as engine:
        grads_of(net)

    kept = engine.account.total.kept
    assert set(kept) - {"parameter", "buffer", "input"} == {why} - {""}


@pytest.mark.parametrize(("where", "number"), [("**", 1), ("inner.**", 0)])
def test_what_a_checkpoint_holds_beside_the_program_is_counted_where_it_is_selected(where, number):
    """A tensor in a container stays in memory, since the program has it, too."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(20, 20), nn.Linear(20, 20)

        def forward(self, x):
            self.held = {"x": self.first(x)}
            return checkpoint(lambda held: self.inner(held["x"]), self.held, use_reentrant=False)

    model = Checkpointed()
    with kedge.offload(model, where, to=kedge.Disk(rebuild=False), min_bytes=64) as account:
        model(X).sum().backward()

    assert account.total.kept["checkpoint"].number == number
    assert account.total.kept["checkpoint"].bytes == number * X.nbytes


def test_choices_can_be_mixed(net):
    """Some kept, some moved, some rebuilt: gradients are equal."""
    plain = grads_of(net, 3)
    planner = Alternating(Choice.MOVE, Choice.KEEP, Choice.REBUILD)
    with engaged(net, Shelf(), find=find, planner=planner):
        assert all(map(torch.equal, plain, grads_of(net, 3)))


def test_one_module_is_wrapped(net):
    """Called, the same object offloads what is saved in that call, and nothing of it stays on the module."""
    plain = grads_of(net)
    before = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()]
    inner = kedge.offload(net.inner, to=kedge.Disk(rebuild=False), min_bytes=64)
    net.zero_grad()
    inner(net.act(net.first(X)) * net.mask).sin().pow(2).sum().backward()

    assert all(map(torch.equal, plain, [param.grad for param in net.parameters()]))
    assert set(inner.account.rows) == {"0", "1"}
    assert inner.account.total.moved["disk"].number == 1  # what the linear layer saves is its input
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()] == before


def test_a_wrapped_module_can_be_called_in_threads(net):
    """Calls that overlap share what is put in force, and the last one takes it off."""
    wrapped = kedge.offload(net, to=kedge.Disk(rebuild=False), min_bytes=64)
    threads = [threading.Thread(target=lambda: wrapped(X).sum()) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrapped.account.module("act").moved["disk"].number == 8
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in net.modules())


def test_a_block_ends_whatever_happens(net):
    """An exception in forward, and in backward, leaves no hook and no pair in force."""
    with pytest.raises(ZeroDivisionError):
        with kedge.offload(net, to=kedge.Disk(), min_bytes=64):
            y = net(X).sum()
            y.register_hook(lambda g: 1 / 0)
            y.backward()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        with kedge.offload(net):
            net(torch.ones(3, 3))
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in net.modules())


def test_a_block_can_be_opened_again_but_not_within_itself(net):
    """The account of a second block goes on where the first one's ended."""
    block = kedge.offload(net, to=kedge.Disk(), min_bytes=64)
    with block as account:
        grads_of(net)
        with pytest.raises(OffloadError, match="open already"):
            block.__enter__()
    packs = account.total.packs
    with block as again:
        grads_of(net)
    assert again is account
    assert account.total.packs == 2 * packs


def test_blocks_nest(net):
    """What the inner block only keeps by reference is offered to the outer one."""
    plain = grads_of(net)
    with kedge.offload(net, to=kedge.Disk(rebuild=False), min_bytes=64) as outer:
        with kedge.offload(net, "inner.**", min_bytes=64) as inner:
            assert all(map(torch.equal, plain, grads_of(net)))
    assert inner.total.rebuilt or inner.total.kept
    assert outer.total.moved


def test_the_account_adds_up(net):
    """Every saved tensor is in exactly one column; sums over modules and steps are the whole."""
    saved = []
    pair = torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.nbytes) or t, lambda t: t
    )
    with pair:
        grads_of(net, 2)
    with kedge.offload(net, to=kedge.Disk(), min_bytes=64) as account:
        grads_of(net, 2)

    total = account.total
    assert (total.packs, total.naive) == (len(saved), sum(saved))
    assert account.step.packs * 2 == total.packs
    assert sum(account.module(path).naive for path in account.rows) == total.naive
    taken = total.sum("moved").bytes + total.sum("rebuilt").bytes
    assert total.freed.bytes == taken
    assert total.unique.bytes <= total.naive
    assert total.restored.stalled > 0
    text = str(account)
    assert text.startswith("module")
    assert "2 steps; kept: " in text
    assert "inner.0" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "disk"}, r"to='disk': use kedge.Rebuild\(\), kedge.Cpu\(\) or kedge.Disk\(\)"),
        ({"min_bytes": -1}, "min_bytes=-1: use a number of bytes, or a text"),
        ({"min_bytes": 1e6}, "min_bytes=1000000.0: use a number of bytes"),
        ({"max_memory": "2 GB", "max_slowdown": 1.05}, "exclude each other"),
        ({"where": 3}, "where=3: use a selector"),
        ({"where": "inner:saved"}, 'so name modules alone: "inner"'),
        ({"codec": "zip"}, "codec='zip'"),
    ],
)
def test_what_cannot_be_done_is_said(net, options, said):
    """A wrong argument is an error that names it, what it was and what it can be."""
    with pytest.raises((OffloadError, ValueError), match=said):
        kedge.offload(net, **options)


def test_a_selector_of_nothing_is_an_error(net):
    """A selector that stands for nothing names the nearest modules."""
    with pytest.raises(NoSiteMatched, match='"inner"'):
        kedge.offload(net, "iner")
    with pytest.raises(OffloadError, match=r"takes a torch.nn.Module, not a list"):
        kedge.offload([net])
    with pytest.raises(
        OffloadError,
        match=r"takes one model, .* not a second .*; for several models, give torch.nn.Mod",
    ):
        kedge.offload(net, net)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: kedge.Disk("/no/such/folder"), "there is no such folder"),
        (lambda: kedge.Disk(3), "path must be a folder, or None"),
        (lambda: kedge.Disk(rebuild=1), "rebuild must be True or False"),
        (lambda: kedge.Disk(uncached="no"), "uncached must be True, False or None"),
        (lambda: kedge.Cpu(pin=None), "pin must be True or False"),
    ],
)
def test_a_wrong_destination_is_an_error(make, said):
    """Destinations check what they are given."""
    with pytest.raises(OffloadError, match=said):
        make()


def test_what_is_rebuilt_wrong_raises():
    """A program that changes, behind autograd's back, what a tensor is rebuilt from gets an error and no wrong gradient."""
    change = [False]

    class Sly(nn.Module):
        def forward(self, x):
            h = x * 3
            if change[0]:
                with torch.no_grad():
                    h.clamp_(max=0)
            return h.clone(memory_format=torch.channels_last).sin()

    x = torch.linspace(-1, 1, 96).view(2, 4, 3, 4).requires_grad_()
    with engaged(model := Sly(), find=find) as engine:
        (x * 1 + model(x)).sum().backward()
        assert engine.account.total.rebuilt["copy"].number == 1
        change[0] = True
        with pytest.raises(RebuiltWrong, match="differs from the saved one"):
            (x * 1 + model(x)).sum().backward()


def test_an_account_of_nothing_counts_no_step(net):
    """Before anything is saved there was no step; after the first tensor there is one."""
    with kedge.offload(net) as account:
        assert "no step: autograd saved nothing, as under torch.no_grad; kept: nothing" in str(
            account
        )
        with torch.no_grad():
            net(torch.randn(4, 20))
        assert "no step" in str(account)
        net(torch.randn(4, 20)).sum().backward()
        assert "\n1 step; kept: " in str(account)


def test_a_warning_names_the_line_of_the_program(net):
    """Autograd saves inside of PyTorch's functions; the program's line is the one that called them."""
    with pytest.warns(NothingGained) as said, kedge.offload(net, to=kedge.Cpu(), min_bytes=0):
        F.gelu(net.first(torch.randn(4, 20)))
    (warning,) = said
    assert warning.filename == __file__
    assert "F.gelu(net.first(" in Path(__file__).read_text().splitlines()[warning.lineno - 1]
