"""Watching what Ignite, Accelerate and torchtune train, each by one object."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kedge.store.recording import Recording
from kedge.testing import assert_unhooked
from tests.integrations.smallnets import net

BATCHES = 6
SITES = {"0:out", "3:out", "2.weight:param.grad", "loss", ":grad.norm"}


def batches():
    """Make some batches of inputs and targets."""
    return [(torch.randn(16, 4), torch.rand(16, 4)) for _ in range(BATCHES)]


def whole(watched, steps=BATCHES):
    """Whether a recording has all steps, under the names of the model, and ended well."""
    recording = Recording.open(watched.recording)
    names = {site.site for site in recording.sites}
    return names >= SITES and len(recording.steps) == steps and recording.end.error is None


@pytest.fixture
def ignite():
    """Ignite's module of engines."""
    return pytest.importorskip("ignite.engine", reason="pytorch-ignite is not installed")


def engine_of(ignite, model, *, fails_at=None):
    """Make an engine that trains a model."""
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss()

    def update(engine, batch):
        if engine.state.iteration == fails_at:
            raise RuntimeError("no more data")
        optimizer.zero_grad()
        loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return ignite.Engine(update)


def test_an_engine_of_ignite_is_watched_from_its_first_batch_to_its_end(ignite, watch):
    """Each run of the engine has a recording with the names of the model's modules."""
    from kedge.integrations.ignite import IgniteHandler

    model = net()
    handler = IgniteHandler(watch(every=1))
    engine = engine_of(ignite, model)
    handler.attach(engine, model)
    engine.run(batches())
    assert_unhooked(model)
    assert whole(handler.watched)
    engine.run(batches(), max_epochs=2)  # goes on after the first epoch
    assert handler.watched.recording.name == "run-2.kedge"
    assert whole(handler.watched)


def test_an_engine_that_is_terminated_ends_its_watch(ignite, watch):
    """`Engine.terminate` is an end, also where it skips the handlers of the completed run."""
    from kedge.integrations.ignite import IgniteHandler

    for skip in (False, True):
        handler = IgniteHandler(watch(f"{skip}.kedge", every=1))
        engine = engine_of(ignite, net())
        handler.attach(engine)
        stop = ignite.Events.ITERATION_COMPLETED(once=3)
        engine.add_event_handler(stop, lambda e, skip=skip: e.terminate(skip_completed=skip))
        engine.run(batches())
        assert whole(handler.watched, 3)


def test_an_exception_in_an_engine_is_raised_as_without_kedge(ignite, watch):
    """Ignite raises no exception that has a handler, so Kedge has none; the watch ends by hand."""
    from kedge.integrations.ignite import IgniteHandler

    handler = IgniteHandler(watch(every=1))
    engine = engine_of(ignite, net(), fails_at=3)
    handler.attach(engine)
    with pytest.raises(RuntimeError, match="no more data"):
        engine.run(batches())
    handler.end()
    assert whole(handler.watched, 2)


def test_a_tracker_of_accelerate_watches_until_the_training_ends(watch):
    """The prepared model has its own names, and accumulated batches are one step."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate import Accelerator

    from kedge.integrations.accelerate import AccelerateTracker

    tracker = AccelerateTracker(watch(every=1))
    accelerator = Accelerator(cpu=True, log_with=tracker, gradient_accumulation_steps=2)
    accelerator.init_trackers("project", config={"lr": 0.1})
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = nn.MSELoss()
    for x, y in batches():
        with accelerator.accumulate(model):
            accelerator.backward(loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.log({"lr": 0.1})
    assert accelerator.get_tracker("kedge", unwrap=True) is tracker.watched
    accelerator.end_training()

    assert whole(tracker.watched, BATCHES // 2)
    logged = Recording.open(tracker.watched.recording).logged
    assert logged["lr"].values.tolist() == [0.1] * (BATCHES // 2)
    assert_unhooked(model)


def test_a_recipe_of_torchtune_is_watched_by_its_logger(tmp_path, capsys):
    """The logger is made as a recipe makes it, from the recipe's settings with one of them replaced."""
    pytest.importorskip(
        "torchtune",
        reason="torchtune is not installed: its latest release needs torchao 0.15 or older",
    )
    from omegaconf import OmegaConf
    from torchtune import config
    from torchtune.models.llama2 import llama2

    settings = {
        "_component_": "kedge.integrations.torchtune.TorchtuneLogger",
        "log_dir": str(tmp_path / "logs"),
    }
    logger = config.instantiate(OmegaConf.create(settings))
    model = llama2(
        vocab_size=20, num_layers=1, num_heads=2, num_kv_heads=2, embed_dim=8, max_seq_len=16
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.randint(20, (2, 8))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        logger.log_dict({"loss": 0.5}, step)
    logger.close()

    recording = Recording.open(logger.watched.recording)
    assert recording.path.parent == tmp_path / "logs"
    assert recording.steps.tolist() == [0, 1, 2]
    assert {"layers.0.attn.q_proj:out", "output.weight:param.grad", "loss"} <= {
        site.site for site in recording.sites
    }
    assert logger.path_to_log_file().read_text().count("loss:0.5") == 3
