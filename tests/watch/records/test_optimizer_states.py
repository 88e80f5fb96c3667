"""A watch records what optimizers keep of parameters, where its selector asks for it."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import kedge
from kedge.errors import NoSuchKind
from kedge.report.page.render import render_page
from kedge.report.shown_run import ShownRun
from kedge.store.recording import Recording
from tests import forked

STEPS = 4


def run(place: Path, sites: str, *, momentum: float | None = None) -> tuple[nn.Module, Recording]:
    """Train a model in a watch; return it with its optimizer's state and the recording."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if momentum is not None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    with kedge.watch(str(place), sites=sites, budget=None, every=1):
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.linspace(-1, step, 8).reshape(2, 4)).square().sum().backward()
            optimizer.step()
    model.kept = {name: optimizer.state[param] for name, param in model.named_parameters()}
    return model, Recording.open(place)


def test_each_tensor_asked_for_is_a_site_of_its_parameter(tmp_path: Path) -> None:
    """Its last statistics are those of the state after the last step."""
    model, recording = run(tmp_path / "a.kedge", "**, **:state[exp_avg_sq], 0.*:state[step]")
    found = {site.site: site for site in recording.of_kind("state")}
    seconds = [f"{name}:state[exp_avg_sq]" for name in model.kept]
    assert set(found) == {*seconds, "0.weight:state[step]", "0.bias:state[step]"}
    for name, kept in model.kept.items():
        site = found[f"{name}:state[exp_avg_sq]"]
        rows = recording.rows(site)
        assert (site.path, site.owner, site.type) == (name, name.rpartition(".")[0], "Linear")
        assert list(rows.step) == list(range(STEPS))
        assert rows.max[-1] == kept["exp_avg_sq"].max()
        assert rows.min[-1] == kept["exp_avg_sq"].min()
    steps = recording.rows(found["0.weight:state[step]"])
    assert list(steps.max) == [1, 2, 3, 4]


def test_nothing_is_recorded_that_is_not_asked_for(tmp_path: Path) -> None:
    """A selector without the kind means modules and parameters; with it alone, nothing else is measured."""
    _, without = run(tmp_path / "a.kedge", "**")
    assert not without.of_kind("state")
    _, alone = run(tmp_path / "b.kedge", "**:state, !**:state[step], !1.*:state")
    assert {site.site for site in alone.of_kind("state")} == {
        f"0.{name}:state[{key}]" for name in ("weight", "bias") for key in ("exp_avg", "exp_avg_sq")
    }
    assert not alone.of_kind("param")


def test_the_training_is_the_same(tmp_path: Path) -> None:
    """To the last bit."""
    seen, _ = run(tmp_path / "a.kedge", "**, **:state")
    plain, _ = run(tmp_path / "b.kedge", "0:out")
    assert all(map(torch.equal, seen.parameters(), plain.parameters()))


def test_what_no_optimizer_keeps_is_said_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what they do keep."""
    run(tmp_path / "a.kedge", "**, 0.weight:state[exp_average]")
    said = capsys.readouterr().err
    assert "no optimizer keeps :state[exp_average]" in said
    assert "they keep [step], [exp_avg], [exp_avg_sq]" in said
    run(tmp_path / "b.kedge", "**, **:state", momentum=0.0)
    assert "it keeps nothing, as SGD without momentum" in capsys.readouterr().err


def test_reports_and_pages_show_it(tmp_path: Path) -> None:
    """As one more site of the parameter's module, which filters select."""
    _, recording = run(tmp_path / "a.kedge", "**, **:state[exp_avg]")
    assert "0.weight:state[exp_avg]" in render_page(ShownRun(recording, ()))


def test_leaves_of_other_kinds_are_still_refused(tmp_path: Path) -> None:
    """A watch records whole values of modules."""
    with pytest.raises(NoSuchKind, match="one leaf"), kedge.watch(tmp_path / "a", sites="0:out[0]"):
        pass


SHARDED = """
    import os, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(step)
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
    if "RANK" in os.environ:
        dist.destroy_process_group()
"""


@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo",
)
def test_ranks_are_merged_as_for_one_process(tmp_path: Path) -> None:
    """Shards, uneven ones too, add up to the whole; a scalar that all ranks keep counts once."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SHARDED))
    options = ("--every", "1", "--budget", "none", "--sites", "**, **:state")
    for name, launch in (
        ("one", ()),
        ("two", ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")),
    ):
        command = [sys.executable, "-W", "ignore", "-m", *launch, "kedge", "run", *options]
        done = forked.run(
            [*command, "-o", str(tmp_path / f"{name}.kedge"), str(script)], timeout=300
        )
        assert done.returncode == 0, done.stderr
    one, two = (Recording.open(tmp_path / f"{name}.kedge") for name in ("one", "two"))
    merged = {site.site: site for site in two.of_kind("state")}
    assert len(merged) == 12
    assert merged.keys() == {site.site for site in one.of_kind("state")}
    for site in one.of_kind("state"):
        alone, spread = one.rows(site), two.rows(merged[site.site])
        assert list(alone.count) == list(spread.count)
        for figure in ("min", "max", "sum"):
            ours, theirs = getattr(spread, figure), getattr(alone, figure)
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
