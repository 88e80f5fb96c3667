"""Rows about reading values: of modules, operations, gradients, saved tensors."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge
from capable import programs
from capable.row import Lacking, check, close, row, same
from capable.runs import reported


@row(1, "the output of a module, a tensor")
def output() -> None:
    """Beside the layers called one by one."""
    model, x = programs.layers()
    with kedge.hook(model, "1", kedge.record()) as acts:
        model(x)
    same(acts["1"], model[1](model[0](x)), "the output")


@row(2, "a tensor in a dict of lists that the program later overwrites")
def overwritten() -> str:
    """As a copy; without one reading it is an error and not another value."""
    model, x = programs.made(programs.Overwrites)
    with torch.no_grad():
        plain = model.parts.b(x)
        with kedge.hook(model, "parts:out", kedge.record(copy=True)) as acts:
            model(x)
        with kedge.hook(model, "parts:out", kedge.record()) as uncopied:
            model(x)
    same(acts["parts:out[rest.0]"], plain, "the tensor")
    try:
        read = uncopied["parts:out[rest.0]"]
    except kedge.errors.Overwritten:
        return "with `copy=True`; without it an error, `Overwritten`"
    raise Lacking(f"without a copy it reads {read.abs().sum().item()}, silently")


@row(3, "the gradient of each tensor in such a structure")
def gradients() -> None:
    """Beside those of `torch.autograd.grad`."""
    model, x = programs.made(programs.Sums)
    with kedge.hook(model, "parts:out.grad", kedge.record()) as acts:
        model(x.requires_grad_()).sum().backward()
    parts = model.parts(x)
    leaves = [parts["h"], *parts["rest"]]
    loss = (leaves[0].sin() + leaves[1].cos() * leaves[2]).sum()
    names = ("[h]", "[rest.0]", "[rest.1]")
    for name, plain in zip(names, torch.autograd.grad(loss, leaves), strict=True):
        same(acts[f"parts:out.grad{name}"], plain, f"the gradient of {name}")


@row(4, "an argument that is passed by keyword, and its gradient")
def keyword() -> None:
    """Beside the product's derivative."""
    model, x = programs.made(programs.Keyword)
    with kedge.hook(model, "scaled:in[by], scaled:in.grad[by]", kedge.record()) as acts:
        model(x).sum().backward()
    same(acts["scaled:in[by]"], model.first(x).sin(), "the argument")
    same(acts["scaled:in.grad[by]"], x, "the gradient")


@row(5, "each call of a module that is called three times")
def calls() -> None:
    """Beside the same three calls."""
    model, x = programs.made(programs.Thrice)
    with kedge.hook(model, "layer", kedge.record()) as acts:
        model(x)
    for call in range(3):
        plain = model.layer(x)
        same(acts[f"layer#{call}"], plain, f"call {call}")
        x = plain.tanh()


@row(6, "operations between modules: a residual sum, F.gelu")
def operations() -> None:
    """Both beside the lines of the forward."""
    model, x = programs.made(programs.Block)
    with kedge.hook(model, "/gelu, /add", kedge.record()) as acts:
        model(x)
    hidden = nn.functional.gelu(model.up(x))
    same(acts["/gelu"], hidden, "F.gelu")
    same(acts["/add"], x + model.down(hidden), "the sum")


@row(7, "operations outside of any module")
def outside() -> None:
    """Those of the program's own lines, without a model; one is edited too."""
    x = torch.linspace(-1, 1, 5)
    with kedge.hook("/relu", kedge.record()) as acts:
        torch.relu(x)
    same(acts["/relu"], x.clamp(min=0), "the operation")
    with kedge.hook("/sin", kedge.scale(2)):
        edited = x.sin()
    same(edited, torch.sin(x) * 2, "the edited operation")


@row(8, "a local variable of a forward by its name")
def variable() -> None:
    """Read, and set to zero."""
    model, x = programs.made(programs.Block)
    with kedge.hook(model, "/hidden=", kedge.record()) as acts:
        model(x)
    same(acts["/hidden="], nn.functional.gelu(model.up(x)), "the variable")
    with kedge.hook(model, "/hidden=", kedge.zero()):
        edited = model(x)
    same(edited, x + model.down(torch.zeros(5, 8)), "the model with another value")


@row(20, "a module's output for each token of generate")
def generated() -> None:
    """Beside a hook of PyTorch that appends to a list."""
    model, tokens = programs.gpt()
    plain: list[Tensor] = []
    block = model.transformer.h[0].mlp
    ask = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    handle = block.register_forward_hook(lambda module, args, value: plain.append(value))
    model.generate(tokens, **ask)
    handle.remove()
    with kedge.hook(model, "transformer.h.0.mlp", kedge.record(keep=None)) as acts:
        model.generate(tokens, **ask)
    records = acts.records("transformer.h.0.mlp")
    check(len(records) == len(plain) > 1, f"{len(records)} records of {len(plain)} calls")
    for record, value in zip(records, plain, strict=True):
        same(record.value, value, "a token's output")


@row(21, "the pattern of an attention written in PyTorch")
def attention() -> None:
    """Beside `output_attentions=True`."""
    model, tokens = programs.gpt(attn_implementation="eager")
    plain = model(tokens, output_attentions=True).attentions
    with kedge.hook(model, "transformer.h.*.attn/softmax", kedge.record()) as acts:
        model(tokens)
    for layer, pattern in enumerate(plain):
        same(acts[f"transformer.h.{layer}.attn/softmax"], pattern, f"the pattern of layer {layer}")


@row(22, "why a hook never ran")
def never_ran() -> str:
    """A parameter that no backward reaches, and an input that requires no gradient."""
    model, x = programs.layers()
    with kedge.session() as s:
        s.hook(model, "2.weight:param.grad", kedge.record())
        model[1](model[0](x)).sum().backward()
        unreached = s.ledger()["2.weight:param.grad"].cause
    check(unreached is not None, "the ledger gives no cause for the gradient")
    with kedge.session() as s:
        s.hook(model, "0:in.grad", kedge.record())
        model(x).sum().backward()
        gradless = s.ledger()["0:in.grad"].cause
    check(gradless is not None, "the ledger gives no cause for the input")
    return f"“{unreached.why}”; “{gradless.why}”"


class Wide(nn.Module):
    """48 outputs of a megabyte each, and what is alive when the last one is made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Tanh() for _ in range(48)])
        self.alive = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        gc.collect()
        self.alive = len(storages(x.numel()))
        return x


def storages(numbers: int) -> set[int]:
    """Return the addresses of all tensors of a size that Python holds."""
    tensors = [each for each in gc.get_objects() if type(each) is Tensor]
    return {each.data_ptr() for each in tensors if each.numel() == numbers}


@row(23, "no more memory than what is recorded")
def memory() -> str:
    """Counted in outputs that are alive at the end of the forward, input and result among them."""
    model, x = Wide(), torch.randn(1 << 18)
    alive = {}
    asked = {
        "nothing": ("layers.*", kedge.record, kedge.at(1000)),
        "all 48": ("layers.*", kedge.record, None),
        "one": ("layers.7", kedge.record, None),
        "statistics of all": ("layers.*", kedge.measure, None),
    }
    for name, (selector, action, when) in asked.items():
        with torch.no_grad(), kedge.hook(model, selector, action(), when=when):
            model(x)
        alive[name] = model.alive
    check(alive["all 48"] <= 50, f"{alive['all 48']} outputs alive for 48 records")
    check(alive["one"] <= alive["nothing"] + 1, f"{alive['one']} alive for one record")
    check(alive["statistics of all"] <= alive["nothing"] + 1, "statistics keep values")
    return "outputs alive: " + ", ".join(f"{name} {count}" for name, count in alive.items())


@row(24, "observing changes no bit of a training")
def bits() -> None:
    """Five steps with every site recorded beside five without a hook."""

    def trained(watch: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3),
            nn.Flatten(), nn.Linear(144, 5),
        )  # fmt: skip
        optimizer = torch.optim.Adam(model.parameters())
        with kedge.session() as s:
            if watch:
                kinds = "**:out, **:in, **:out.grad, **:in.grad, **:param.grad, **:saved"
                s.hook(model, kinds, kedge.record())
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(6, 1, 8, 8)).square().sum().backward()
                optimizer.step()
        return list(model.state_dict().values())

    for found, plain in zip(trained(True), trained(False), strict=True):
        same(found, plain, "the trained model")


@row(25, "a checkpoint's second forward does not count")
def recomputed() -> None:
    """One record for one call, though PyTorch calls the module twice."""
    model, x = programs.layers()
    with kedge.hook(model, "0", kedge.record(keep=None)) as acts:
        checkpoint(model, x.requires_grad_(), use_reentrant=False).sum().backward()
    check(len(acts.records("0")) == 1, f"{len(acts.records('0'))} records of one call")


@row(26, "tensors saved for backward: read, edited, counted by module")
def saved() -> None:
    """The input that a linear layer saves, its edited copy in backward, and the bytes of both layers."""
    model, x = programs.layers()
    with kedge.hook(model, "0:saved", kedge.record()) as acts:
        model(x).sum().backward()
    same(acts["0:saved[0]"], x, "what the layer saved")
    model.zero_grad()
    with kedge.hook(model, "2:saved[0]", kedge.scale(2)):
        model(x).sum().backward()
    hidden = model[1](model[0](x))
    close(model[2].weight.grad, 2 * hidden.sum(0).expand(3, 8), "the gradient of an edited save")
    account = kedge.saved(model)(x)
    bytes_of = {sums.path: sums.bytes for sums in account.by_module()}
    check(account.total.bytes == 4 * (5 * 4 + 5 * 8), f"{account.total.bytes} bytes in all")
    check(sum(bytes_of.values()) == account.total.bytes, "the modules do not add up")


@row(27, "the same of a program without a module")
def saved_alone() -> None:
    """By a hook, and in the recording of `kedge run --saved`."""
    z = torch.randn(5, requires_grad=True)
    with kedge.hook(":saved", kedge.record()) as acts:
        y = z.exp()
        y.sum().backward()
    same(acts[":saved[0]"], y, "what exp saved")
    lines = (
        "import torch",
        "z = torch.ones(1000, requires_grad=True)",
        "z.exp().sin().sum().backward()",
    )
    said = reported("\n".join(lines), "--saved")
    check("exp #1 keeps for backward: result [1000] 4 kB" in said, "`kedge run` names no bytes")


@row(28, "every module of every model, none of them named")
def everywhere() -> None:
    """A model, a teacher and a loss that are made inside of the block."""
    with kedge.session() as s:
        acts = s.hook(kedge.everywhere, "**", kedge.record())
        student, teacher, loss = nn.Linear(4, 2), nn.Linear(4, 2), nn.MSELoss()
        x = torch.randn(3, 4)
        loss(student(x), teacher(x))
    same(acts["Linear_2"], teacher(x), "the teacher's output")
    same(acts["MSELoss"], loss(student(x), teacher(x)), "the loss")


@row(29, "gradients of tensors, autograd's nodes, .grad once it is accumulated")
def autograd() -> None:
    """In one session, in the order in which autograd has them."""
    z = torch.tensor([1.0, 2.0], requires_grad=True)
    o = (z**2).sum()
    with kedge.session() as s:
        tensors = s.hook({"z": z}, ":grad, :acc", kedge.record())
        nodes = s.hook(o.grad_fn, ":pre, :post", kedge.record())
        o.backward()
        order = s.timeline().sites
    same(tensors["z:grad"], 2 * z.detach(), "the gradient")
    same(tensors["z:acc"], z.grad, "the accumulated gradient")
    values = list(nodes.values())
    same(values[0], torch.ones(()), "what arrives at the node")
    same(values[1], torch.ones(2), "what leaves it")
    check(order[-1] == "z:acc", f"the order is {', '.join(order)}")


@row(18, "the tool's own hooks are gone after an exception")
def after_an_error() -> None:
    """An error in the model, one in an action and a wrong name; then no module has a hook."""
    model, x = programs.layers()
    before = hooks_of(model)

    def broken(value: Tensor) -> None:
        raise ArithmeticError

    attempts: list[tuple[str, Any, Tensor]] = [
        ("**:out, **:in.grad", kedge.record(), torch.randn(5, 9)),
        ("1", broken, x),
        ("nothing", kedge.record(), x),
    ]
    for selector, action, given in attempts:
        raised = False
        try:
            with kedge.hook(model, selector, action):
                model(given)
        except Exception:  # noqa: BLE001 - which error it is, is not the question
            raised = True
        check(raised, f"no error from {selector}")
        check(hooks_of(model) == before, f"hooks are left after {selector}")


def hooks_of(model: nn.Module) -> list[list[int]]:
    """Return the identifiers of all hooks on the modules of a model."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [
        sorted(getattr(module, table)) for module in model.modules() for table in tables
    ]  # fmt: skip


@row(19, "the user's own hooks are spared")
def spared() -> None:
    """A hook set before, and one set inside of the block, run afterwards."""
    model, x = programs.layers()
    ran: list[str] = []
    model[0].register_forward_hook(lambda *_: ran.append("before"))
    with kedge.hook(model, "**", kedge.record()):
        model(x)
        model[0].register_forward_hook(lambda *_: ran.append("inside"))
    model(x)
    check(ran == ["before", "before", "inside"], f"{', '.join(ran)} ran")
