"""What the page on integrations says of training loops: accumulation, scaling, clipping, gradients that are None."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from kedge.store.recording import Recording
from tests.integrations.smallnets import net, train

SCALE = 1024.0


def norms(recording, site):
    """Return the norm of a site in every step."""
    return np.sqrt(recording.rows(site).sumsq).tolist()


def norm_of(parameters):
    """Return the norm of all gradients."""
    return torch.linalg.vector_norm(
        torch.cat([parameter.grad.flatten() for parameter in parameters])
    ).item()


def scaled(model, batches, steps, spoiled=-1):
    """Train with accumulation, loss scaling and clipping; return the scaled norm before clipping of each step taken."""
    optimizer, scaler = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.amp.GradScaler("cpu", init_scale=SCALE),
    )
    made = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        for _ in range(batches):
            x = torch.randn(4, 4) * (1e38 if step == spoiled else 1)
            scaler.scale(model(x).square().mean() / batches).backward()
        if step != spoiled:
            made.append(norm_of(model.parameters()))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return made


def test_the_norm_of_all_gradients_is_the_one_that_backward_leaves(watch):
    """It is of the accumulated gradients, neither unscaled nor clipped, and so are those of single parameters."""
    with watch(every=1) as run:
        made = scaled(nn.Linear(4, 1), batches=3, steps=4)
    recording = Recording.open(run.recording)

    assert norms(recording, ":grad.norm") == pytest.approx(made, rel=1e-5)
    assert recording.rows("weight:param.grad").calls.tolist() == [1] * 4
    both = np.hypot(norms(recording, "weight:param.grad"), norms(recording, "bias:param.grad"))
    assert both.tolist() == pytest.approx(made, rel=1e-5)
    assert min(made) > SCALE / 100


def test_a_step_that_the_scaler_skips_is_counted_with_the_next(watch):
    """Its batches are in the row of the step that is taken, and its infinities are no error."""
    with watch(every=1) as run:
        made = scaled(nn.Linear(4, 1), batches=2, steps=5, spoiled=2)
    recording = Recording.open(run.recording)

    assert recording.rows(":out").calls.tolist() == [2, 2, 4, 2]
    assert norms(recording, ":grad.norm") == pytest.approx(made, rel=1e-5)
    assert "error" not in {finding.severity for finding in run.findings()}


def test_a_parameter_without_a_gradient_has_no_row(watch):
    """A frozen parameter and one in a part that was not used are not measured, whenever gradients are set to None."""
    model = nn.ModuleDict({"used": net(), "unused": nn.Linear(4, 4)})
    model["used"][0].weight.requires_grad_(False)
    with watch(every=1).naming(model) as run:
        train(model["used"], 3)
    sites = {site.site for site in Recording.open(run.recording).sites if site.kind == "param.grad"}

    assert sites == {"used.0.bias:param.grad", "used.2.weight:param.grad", "used.2.bias:param.grad"}


def test_validation_between_steps_is_not_measured(watch):
    """What runs without gradients while something is trained is not in the rows."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(every=1) as run:
        for _ in range(3):
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.randn(99, 4))

    assert Recording.open(run.recording).rows("0:out").count.tolist() == [16 * 8] * 3
