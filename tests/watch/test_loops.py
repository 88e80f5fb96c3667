"""Training loops of every shape: watched at any level they compute the same bits, leave nothing behind, and count right."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from kedge.watch.step import StepKind
from tests.marks import sampled
from tests.watch.watched import LEVELS, Paced, batch, names, net, watched

Tables = Callable[..., dict[str, Any]]
Result = list[Tensor]
STEPS = 6


def params(*models: nn.Module) -> Result:
    """Copy what models hold."""
    return [t.detach().clone() for m in models for t in (*m.parameters(), *m.buffers())]


def alternating() -> Result:
    """A GAN: two models, two optimizers."""
    generator, critic, losses = (
        net(),
        nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)),
        [],
    )
    ours, theirs = (
        torch.optim.Adam(generator.parameters(), 1e-2),
        torch.optim.SGD(critic.parameters(), 1e-2),
    )
    for _ in range(STEPS):
        theirs.zero_grad()
        loss = critic(torch.randn(5, 2)).mean() - critic(generator(batch()).detach()).mean()
        loss.backward()
        theirs.step()
        ours.zero_grad()
        critic(generator(batch())).mean().backward()
        ours.step()
        losses.append(loss.detach())
    return [*params(generator, critic), *losses]


def within_backward() -> Result:
    """An optimizer a parameter, which steps as soon as its gradient is there."""
    model = net()
    optimizers = {p: torch.optim.SGD([p], 1e-2, momentum=0.9) for p in model.parameters()}

    def step(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(STEPS):
        model(batch()).square().mean().backward()
    return params(model)


def closures() -> Result:
    """LBFGS calls the model many times a step."""
    model, x, losses = net(), batch(), []
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.1, max_iter=5, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
    return [*params(model), *losses]


def accumulated() -> Result:
    """Four backwards a step, and a graph that is differentiated twice."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(STEPS):
        for _ in range(3):
            model(batch()).square().mean().backward()
        loss = model(batch()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return params(model)


def penalized() -> Result:
    """The gradient of a gradient."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(STEPS):
        x = batch().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        optimizer.zero_grad()
        (slope.norm(dim=1) - 1).square().mean().backward()
        optimizer.step()
    return params(model)


def evaluated() -> Result:
    """Evaluation between the steps, in no_grad and in inference mode."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
    optimizer, seen = torch.optim.SGD(model.parameters(), 1e-2), []
    for step in range(STEPS):
        model.train()
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad() if step % 2 else torch.inference_mode():
            seen += [model(batch()).clone() for _ in range(3)]
    return [*params(model), *seen]


def generated() -> Result:
    """A training loop that is a generator, which is not run to its end."""
    model = net()

    def training() -> Iterator[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for _ in itertools.count():
            optimizer.zero_grad()
            loss = model(batch()).square().mean()
            yield loss.detach()
            loss.backward()
            optimizer.step()

    losses = list(itertools.islice(training(), STEPS + 1))
    return [*params(model), *losses]


def scheduled() -> Result:
    """Learning rates that change, clipped gradients, and an average of the weights."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
    return [*params(model, average), average(batch())]


def scaled() -> Result:
    """A GradScaler on the CPU that skips steps, in autocast."""
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch()).float().square().mean() * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [*params(model), torch.tensor(scaler.get_scale())]


def normalized() -> Result:
    """Parametrized weights: a norm, and a spectral norm with a state of its own; one is taken off on the way."""
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 8)),
        parametrizations.spectral_norm(nn.Linear(8, 8)),
        nn.Linear(8, 2),
    )
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(STEPS):
        if step == 3:
            parametrize.remove_parametrizations(model[0], "weight")
            optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        optimizer.zero_grad()
        with parametrize.cached():
            (model(batch()).square().mean() + model(batch()).mean()).backward()
        optimizer.step()
    return params(model)


def changing() -> Result:
    """Modules are added, replaced and removed between the steps."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for step in range(STEPS):
        if step == 1:
            model.append(nn.Linear(4, 4))
        if step == 2:
            model[0] = nn.Linear(4, 4)
        if step == 4:
            del model[1]
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()
    return params(model)


def frozen() -> Result:
    """Layers are frozen and thawed on the way."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    model[0].requires_grad_(False)
    for step in range(STEPS):
        model[0].requires_grad_(step >= 3)
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()
    return params(model)


def averaged() -> Result:
    """An average made by deepcopy, and checkpoints in every step, loaded at the end."""
    model = net()
    optimizer, average, saved = torch.optim.SGD(model.parameters(), 1e-2), copy.deepcopy(model), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(batch()) - average(batch()).detach()).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
        file = io.BytesIO()
        torch.save(model, file)
        saved += [
            torch.load(io.BytesIO(file.getvalue()), weights_only=False),
            pickle.loads(pickle.dumps(model)),
        ]
        saved.append(copy.deepcopy(model))
    with torch.no_grad():
        return [*params(model, average, *saved), *(twin(batch()) for twin in saved)]


def functional() -> Result:
    """A loop of torch.func: no optimizer, no backward."""
    model = net()
    weights = {n: p.detach() for n, p in model.named_parameters()}

    def loss(w: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, w, (x,)).square().mean()

    seen = []
    for _ in range(STEPS):
        grads = torch.func.grad(loss)(weights, batch())
        seen.append(torch.func.vmap(loss, (None, 0))(weights, batch()))
        weights = {n: w - 0.1 * grads[n] for n, w in weights.items()}
    return [*weights.values(), *seen]


def by_hand() -> Result:
    """No optimizer: the program writes the parameters itself."""
    model = net()
    for _ in range(STEPS):
        model(batch()).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
                p.grad = None
    return params(model)


def by_two_names() -> Result:
    """One module is two attributes of a model, and is called alone as well."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["c"] = model["a"]
    whole = nn.Sequential(model["a"], nn.Tanh(), model["b"], model["c"])
    optimizer = torch.optim.SGD(whole.parameters(), 1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (whole(batch()) + whole[0](batch())).square().mean().backward()
        optimizer.step()
    return params(whole)


def small_and_many() -> Result:
    """Modules with and without parameters are made anew in every step."""
    model = net()
    optimizer, seen = torch.optim.SGD(model.parameters(), 1e-2), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        head = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        loss = nn.SmoothL1Loss()(nn.Softmax(-1)(head(model(batch()))), torch.zeros(5, 2))
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
    return [*params(model), *seen]


def folds() -> Result:
    """A new model and a new optimizer, again and again."""
    found: Result = []
    for _ in range(5):
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            optimizer.step()
        found += params(model)
        del model, optimizer
    return found


def interrupted() -> Result:
    """Errors in the middle of a forward, a backward and a step, which the program catches."""
    model, kinds = net(), itertools.cycle([ValueError, KeyboardInterrupt, SystemExit])
    optimizer, armed = torch.optim.SGD(model.parameters(), 1e-2), []

    def raising(*args: Any) -> None:
        if armed:
            raise armed.pop()("stop")

    model[1].register_forward_hook(raising)
    model[1].register_full_backward_hook(raising)
    optimizer.register_step_pre_hook(raising)
    for step in range(4 * STEPS):
        try:
            optimizer.zero_grad()
            armed.extend([next(kinds)] if step % 4 == 1 else [])
            out = model(batch()).square().mean()
            armed.extend([ValueError] if step % 4 == 2 else [])
            out.backward()
            armed.extend([next(kinds)] if step % 4 == 3 else [])
            optimizer.step()
        except (ValueError, KeyboardInterrupt, SystemExit):
            armed.clear()
    return params(model)


def profiled() -> Result:
    """The program sets a profiling function, and trains in a thread of its own."""
    model, calls = net(), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: calls.append(event))

    def train() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            optimizer.step()

    try:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        train()
    finally:
        sys.setprofile(before)
    assert calls
    return params(model)


LOOPS = {
    **dict.fromkeys(
        (alternating, within_backward, closures, accumulated, penalized, evaluated, generated),
        STEPS,
    ),
    **dict.fromkeys(
        (scheduled, normalized, changing, frozen, averaged, by_hand, by_two_names, small_and_many),
        STEPS,
    ),
    scaled: STEPS - 1,
    folds: 15,
    profiled: 2 * STEPS,
    interrupted: STEPS,
    functional: None,
}
"""Each program with the number of its steps; that of a loop without an optimizer and a backward is open."""


def bare(program: Callable[[], Result]) -> Result:
    """Run a program from the same seed as ever."""
    torch.manual_seed(1)
    return program()


@pytest.mark.parametrize("levels", sampled(LEVELS, LEVELS[-1:]), ids=names)
@pytest.mark.parametrize(
    ("program", "steps"), LOOPS.items(), ids=[program.__name__ for program in LOOPS]
)
def test_watching_changes_no_bit_counts_each_step_and_leaves_nothing(
    program: Callable[[], Result],
    steps: int | None,
    levels: tuple[StepKind, ...],
    paced: Paced,
    tables: Tables,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Losses and parameters are those of an unwatched run, nothing is said, and no hook of Kedge's is left anywhere.

    A step is a step of the optimizer in charge, however often the model is called or differentiated
    for it.
    """
    plain, before = bare(program), tables()
    paced(*levels)
    results: Result = []
    log = watched(lambda watch: results.extend(bare(program)))
    assert capsys.readouterr().err == ""
    assert tables() == before
    assert log.watch is not None
    assert not log.watch.failed
    assert len(plain) == len(results)
    assert all(torch.equal(a, b) for a, b in zip(plain, results, strict=True))
    summary = log.watch.summary
    assert steps in (None, summary.steps)
    assert sum(summary.levels.values()) == summary.steps
