"""Activation patching: the clean input's values, put one by one into the corrupted input's forward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from kedge.errors import InterventionError, InTrainingMode, NeverFiredWarning, NoSiteMatched
from kedge.recipes.interventions.patching import patch
from kedge.testing import assert_hooks_restored, assert_unhooked


class Reader(nn.Module):
    """Reads tokens: an embedding, a mixing of positions that is used twice, and two logits from the last position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.mix = nn.Linear(4, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 4)

    def forward(self, ids: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        x = self.mix(self.mix(self.embed(ids))) * scale
        return {"logits": self.head(self.lstm(x)[0][:, -1])}


def reader() -> Reader:
    """Make one, always with the same weights."""
    torch.manual_seed(0)
    return Reader().eval()


def difference(out: dict[str, Tensor]) -> Tensor:
    """How much the first logit is ahead."""
    return out["logits"][0, 0] - out["logits"][0, 1]


CLEAN, CORRUPTED = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 7, 3]])


def test_effects_are_those_of_hooks_written_by_hand() -> None:
    """Each value of each call, and each position of it, against a forward hook that puts the clean value in place."""
    model, seen = reader(), []
    handle = model.mix.register_forward_hook(lambda m, i, o: seen.append(o.detach().clone()))
    with torch.no_grad():
        clean = difference(model(CLEAN)).item()
        handle.remove()
        corrupted = difference(model(CORRUPTED)).item()

    def by_hand(call: int, position: int) -> float:
        calls = []

        def put(module, args, output):
            calls.append(1)
            if len(calls) != call + 1:
                return None
            output = output.clone()
            output[:, position] = seen[call][:, position]
            return output

        handle = model.mix.register_forward_hook(put)
        with torch.no_grad():
            number = difference(model(CORRUPTED)).item()
        handle.remove()
        return number

    table = patch(model, CLEAN, CORRUPTED, "mix", difference, along=1)
    assert (table.clean, table.corrupted) == (clean, corrupted)
    assert [(r.site, r.position) for r in table] == [
        (f"mix#{call}:out", i) for call in (0, 1) for i in range(3)
    ]
    assert [r.metric for r in table] == [by_hand(call, i) for call in (0, 1) for i in range(3)]
    assert table["mix#0"] == [(by_hand(0, i) - corrupted) / (clean - corrupted) for i in range(3)]
    assert table.effects.shape == (2, 3)


def test_what_carries_all_gives_all_and_what_carries_nothing_nothing() -> None:
    """The differing token's embedding brings everything back, the others nothing; a tuple's leaves are sites."""
    model = reader()
    with assert_hooks_restored(model):
        whole = patch(model, CLEAN, CORRUPTED, "embed, lstm, head", difference)
        each = patch(model, CLEAN, CORRUPTED, "embed", difference, along=1)

    assert whole["embed"] == whole["head"] == whole["lstm:out[0]"] == 1
    assert whole["lstm:out[1.0]"] == 0  # the last state, which the model does not use
    assert each["embed"] == [0, 1, 0]
    assert whole.effects.tolist() == [1, 1, 0, 0, 1]
    assert str(each).splitlines()[2].split()[:3] == ["embed:out", "at", "1"]
    with pytest.raises(KeyError, match="embed:out"):
        whole["mix"]


def test_inputs_are_called_as_they_are_given() -> None:
    """A tuple holds arguments, a dict keyword arguments; the metric may be a number."""
    model = reader()
    expected = patch(model, CLEAN, CORRUPTED, "embed", difference)
    for clean, corrupted in (
        ((CLEAN, 1.0), [CORRUPTED]),
        ({"ids": CLEAN}, {"ids": CORRUPTED, "scale": 1.0}),
    ):
        table = patch(model, clean, corrupted, "embed", lambda out: difference(out).item())
        assert (table.clean, table.corrupted, table["embed"]) == (
            expected.clean,
            expected.corrupted,
            1,
        )


def test_the_model_draws_the_same_numbers_in_every_run() -> None:
    """With dropout on, a patch differs from the corrupted run by the patch alone; what the model draws is given back."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 64), nn.Dropout(), nn.Linear(64, 1)).train()
    x, rng = torch.randn(1, 3), torch.get_rng_state()
    with pytest.warns(InTrainingMode, match="Dropout 1"):
        table = patch(model, x, x + 1, "2", lambda out: out.sum())
        same = patch(model, x, x, "0", lambda out: out.sum())

    assert table["2"] == 1
    assert same.rows[0].metric == table.clean
    assert torch.equal(torch.get_rng_state(), rng)


def test_equal_metrics_leave_the_effect_open() -> None:
    """Where the two inputs do not differ, there is no share of the difference."""
    table = patch(reader(), CLEAN, CLEAN, "embed", difference)
    assert math.isnan(table["embed"])


def test_what_cannot_be_patched_is_an_error_that_says_why() -> None:
    """Other shapes, a site that never fires, a dimension that is not there, a metric of many numbers."""
    model = reader()
    with pytest.raises(
        InterventionError,
        match=r"float32\[1, 2, 4\] for the corrupted input and float32\[1, 3, 4\]",
    ):
        patch(model, CLEAN, CORRUPTED[:, :2], "embed", difference)
    with pytest.raises(InterventionError, match='"unused".*never called'):
        patch(model, CLEAN, CORRUPTED, "unused", difference)
    with pytest.raises(InterventionError, match="has no dimension 3"):
        patch(model, CLEAN, CORRUPTED, "embed", difference, along=3)
    with pytest.raises(InterventionError, match=r"metric returned float32\[1, 2\]"):
        patch(model, CLEAN, CORRUPTED, "embed", lambda out: out["logits"])
    with pytest.raises(NoSiteMatched):
        patch(model, CLEAN, CORRUPTED, "nowhere", difference)


def test_a_site_that_only_the_clean_input_reaches_is_an_error() -> None:
    """A branch that the corrupted input does not take has nothing to patch."""

    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)

        def forward(self, x):
            return self.a(x) if x.sum() > 0 else x

    with pytest.raises(
        InterventionError, match="has a value for the clean input, but none for the corrupted"
    ):
        patch(Branch(), torch.ones(1, 2), -torch.ones(1, 2), "a", lambda out: out.sum())


def two_layers() -> tuple[nn.Module, Tensor]:
    """Make a model of tokens, and some."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Identity()), torch.randn(3, 5, 4)


def test_patches_along_a_dimension_counted_from_the_end() -> None:
    """``along=-2`` is the same table as ``along=1``; a dimension with nothing in it is an error."""
    model, x = two_layers()
    first, last = (patch(model, x[:1], x[1:2], "0", torch.Tensor.sum, along=dim) for dim in (1, -2))

    assert torch.equal(first.effects, last.effects)
    with pytest.raises(InterventionError, match="nothing in it"):
        patch(model, x[:0], x[:0], "0", torch.Tensor.sum, along=0)


@pytest.mark.parametrize("number", [None, [1.0], 1j])
def test_a_metric_that_gives_no_number_is_an_error_that_says_so(number) -> None:
    """It names what the metric gave, and the hooks are gone."""
    model, x = two_layers()
    with pytest.raises(InterventionError, match="must return one real number"):
        patch(model, x[:1], x[1:2], "0", lambda out: number)
    assert_unhooked(model)


def test_a_site_without_a_value_is_named() -> None:
    """Its row is missing in the table; the warning says why."""
    with pytest.warns(NeverFiredWarning, match=r"mix:out\[0\]: its value has no tensor \[0\]"):
        table = patch(reader(), CLEAN, CORRUPTED, "mix:out[0], embed", difference)

    assert [row.site for row in table] == ["embed:out"]


def test_inputs_without_a_difference_say_so() -> None:
    """Every effect is NaN then."""
    table = patch(reader(), CLEAN, CLEAN, "embed", difference)

    assert str(table).splitlines()[0].endswith(": without a difference, there is no effect")
