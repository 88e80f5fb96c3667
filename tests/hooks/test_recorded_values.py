"""The handle as a mapping: what is in it, under which names, and how it is shown."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import pickle
import re
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.errors import (
    NeverFiredWarning,
    NotRecorded,
    Overwritten,
    ReadError,
    SelectorError,
    SeveralRecorded,
)
from tests.test_notebook import Reader


class Loop(nn.Module):
    """A cell that runs three times, an LSTM, whose output is a structure, and operations."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.lstm = nn.RNNCell(3, 3), nn.LSTM(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for _ in range(3):
            h = self.cell(h, h)
        return torch.relu(self.lstm(h)[0]) + torch.relu(h).relu()


def sequential() -> nn.Sequential:
    """Make a small model."""
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def recorded(model: nn.Module, selector: Any, action: Any = None) -> Any:
    """Return the handle of a hook on a model, after one forward and backward."""
    with kedge.hook(model, selector, kedge.record() if action is None else action) as h:
        model(torch.randn(5, 3, requires_grad=True)).sum().backward()
    return h


def same(a: Any, b: Any) -> bool:
    """Whether two values read are one: the same memory, or the same figures."""
    return a.data_ptr() == b.data_ptr() if isinstance(a, Tensor) else str(a) == str(b)


EVERYTHING = (
    "**, **:in, **:out.grad, **:in.grad, **:param, **:param.grad, **:param.acc, **:saved, **/*"
)


@pytest.mark.parametrize("action", [kedge.record, kedge.measure])
@pytest.mark.parametrize("model", [sequential, Loop])
def test_every_name_of_the_mapping_reads_its_value(model: Any, action: Any) -> None:
    """`dict(acts)` has every value that came, each under a name of its own that reads it again."""
    h = recorded(model(), EVERYTHING, action())
    values = dict(h)

    assert list(values) == list(h) == list(h.keys()) == h.names()
    assert len(values) == len(h) > 20
    assert all(name in h and same(h.get(name), values[name]) for name in values)
    if action is kedge.record:
        assert len(values) == sum(len(records.all()) for records in h.actions[0].by_site.values())
    else:
        assert {s.name for s in values.values()} == {str(site) for site in h.actions[0].sites.seats}


def test_names_are_as_people_write_selectors() -> None:
    """An output is called as its module, a call has its number only where there are several, in the order of arrival."""
    h = recorded(
        Loop(), ["cell", "cell:in", "lstm", "/relu", "/add", ":out", "lstm.weight_ih_l0:param.grad"]
    )

    assert list(h) == [
        *(f"cell#{i}{end}" for i in range(3) for end in (":in[input]", ":in[hx]", "")),
        "lstm:out[0]",
        "lstm:out[1.0]",
        "lstm:out[1.1]",
        *("/relu#0", "/relu#1", "/relu#2"),
        "/add",
        ":out",
        "lstm.weight_ih_l0:param.grad",
    ]
    assert "cell" in h
    with pytest.raises(SeveralRecorded):
        h["cell"]


def test_a_call_that_is_not_the_first_keeps_its_number() -> None:
    """`cell#1` is never shown as `cell`, which would be another call."""
    assert list(recorded(Loop(), "cell#1")) == ["cell#1"]
    assert list(recorded(Loop(), "cell#0")) == ["cell"]


@pytest.mark.parametrize(
    "selector", ["cell, cell#1", "**, lstm:out[0]", ["lstm", "lstm:out[0]"], "cell:in, cell:in[hx]"]
)
def test_overlapping_selectors_keep_one_value(selector: Any) -> None:
    """A value that two selectors of one hook name is there once, and can be read."""
    h = recorded(Loop(), selector)

    assert len(dict(h)) == len(h) >= 3


def test_tensors_have_the_names_that_were_given() -> None:
    """The gradient of a named tensor is under its name, also where `.grad` after accumulation was asked for."""
    z = torch.ones(3, requires_grad=True)
    with kedge.session() as s:
        named, both = (
            s.hook({"z": z}, kedge.record()),
            s.hook({"z": z}, [":grad", ":acc"], kedge.record()),
        )
        (z * 2).sum().backward()

    assert list(named) == ["z"]
    assert list(both) == ["z", "z:acc"]
    assert torch.equal(both["z"], torch.full((3,), 2.0))
    assert list(both["*:acc"]) == ["z:acc"]
    assert list(both["*"]) == ["z"]


def test_names_of_modules_can_be_used_as_they_stand() -> None:
    """`named_modules()` gives names that read, also that of the model and those with characters of the site language."""
    model = sequential()
    model.add_module("a b", nn.ReLU())
    h = recorded(model, "**")

    assert {name: name in h for name, _ in model.named_modules()} == dict.fromkeys(
        ["", "0", "1", "2", "a b"], True
    )
    assert torch.equal(h[""], h[":out"])
    assert torch.equal(h["a b"], h[r"a\ b"])
    assert list(h)[-2:] == [r"a\ b", ":out"]


def test_values_are_not_copied() -> None:
    """Reading, listing and choosing return the memory that was recorded."""
    h = recorded(sequential(), "*")
    pointers = [value.data_ptr() for value in h.values()]

    assert {name: value.data_ptr() for name, value in h.items()} == dict(
        zip(h, pointers, strict=True)
    )
    assert pointers == [h[name].data_ptr() for name in h]
    assert pointers == [value.data_ptr() for value in h["*"].values()]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*", ["0", "1", "2"]),
        ("[02]", ["0", "2"]),
        ("**{Linear}", ["0", "2"]),
        ("**, !1", ["0", "2", ":out"]),
        ("1, 0", ["0", "1"]),
        ("*:out.grad", ["2:out.grad"]),
        ("**{Linear}:param", ["0.weight:param"]),
        (["2", "0"], ["0", "2"]),
        (("2:out.grad",), ["2:out.grad"]),
        (kedge.select("?"), ["0", "1", "2"]),
        ("**/*", ["/add"]),
        ("*:in[input]", ["0:in[input]"]),
    ],
)
@pytest.mark.parametrize("action", [kedge.record, kedge.measure])
def test_a_pattern_reads_a_smaller_mapping(pattern: Any, names: list[str], action: Any) -> None:
    """Patterns and lists select from what was recorded as they do from a model, in the order of arrival."""

    class Added(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    model = Added(*sequential())
    with kedge.hook(model, "**, 2:out.grad, 0.weight:param, /add, 0:in[input]", action()) as h:
        model(torch.randn(5, 3)).sum().backward()
    if action is kedge.measure and pattern == "*:in[input]":
        pattern = "*:in"
    found = h[pattern]

    assert sorted(found) == sorted(names)
    assert list(found) == [name for name in h if name in names]
    assert all(same(found[name], h[name]) for name in names)
    assert (pattern in h) is True if isinstance(pattern, str) else True
    with pytest.raises(NotRecorded, match="'7' is not among the selected values"):
        found["7"]


def test_an_operation_is_chosen_by_patterns_of_operations() -> None:
    """A pattern without an operation selects none; one that excludes takes a module's operations away with it."""
    h = recorded(Loop(), "**, /relu, /add")

    assert list(h["/*"]) == ["/relu#0", "/relu#1", "/relu#2", "/add"]
    assert list(h["**/relu"]) == ["/relu#0", "/relu#1", "/relu#2"]
    assert list(h["**/relu#1"]) == ["/relu#1"]
    assert "/add" not in h["**"]
    assert list(h["cell*#2"]) == ["cell#2"]
    assert list(h["**, **/*, !:out, !/relu"]) == [
        "cell#0",
        "cell#1",
        "cell#2",
        *(f"lstm:out[{i}]" for i in ("0", "1.0", "1.1")),
        "/add",
    ]


@pytest.mark.parametrize("name", ["7", "zero", "*:saved", "**{Conv2d}", 0, None])
def test_what_is_missing_is_a_key_error(name: Any) -> None:
    """So `get` and `in` work as with a dict, and the message is plain text with the names like it."""
    h = recorded(model := sequential(), "*")  # noqa: F841 - the model lives

    assert name not in h
    assert h.get(name) is None
    with pytest.raises(KeyError) as caught:
        h[name]
    assert isinstance(caught.value, NotRecorded)
    assert re.match(
        r"nothing was recorded under|(0|None) is not the name of a site", str(caught.value)
    )
    assert "'nothing" not in str(caught.value)


def test_a_list_is_read_by_the_names_that_one_name_may_have() -> None:
    """A module's second name, an argument's position and PyTorch's own names stand for the same values in a list."""
    model = Loop()
    model.second = model.lstm
    h = recorded(model, "lstm:in, /add, :out")

    assert list(h[["second:in"]]) == list(h["second:in[0], cell"]) == ["lstm:in[input]"]
    assert list(h[["", "lstm:in[0]"]]) == ["lstm:in[input]", ":out"]
    assert list(h["**:in, **, !lstm:in[0]"]) == [":out"]
    with pytest.raises(SelectorError, match=r"^1 is not the text of a selector"):
        h["0", 1]


def test_a_missing_name_comes_with_those_like_it() -> None:
    """A slip of the pen is found without printing all names."""
    model = nn.Sequential()
    for name in ("encoder", "decoder", "head"):
        model.add_module(name, nn.Identity())
    with kedge.hook(model, "*", kedge.record()) as h:
        model(torch.ones(2))

    with pytest.raises(KeyError, match='"encodr".*; the nearest names are "encoder", "decoder"$'):
        h["encodr"]
    with pytest.raises(
        KeyError,
        match='^nothing was recorded under "x\\*"; the names are "encoder", "decoder", "head"$',
    ):
        h["x*"]


def test_types_are_unknown_without_the_model() -> None:
    """A pattern of types needs the model, which a handle does not keep alive."""
    h = recorded(sequential(), "*")
    gc.collect()
    with pytest.raises(KeyError, match="because the model is gone; name paths instead"):
        h["**{Linear}"]
    assert list(h["**"]) == ["0", "1", "2"]


def test_a_malformed_name_is_an_error_everywhere() -> None:
    """`in` does not answer no where the question could not be read."""
    h = recorded(sequential(), "*")
    for use in (lambda: h["0:ouut"], lambda: "0:ouut" in h, lambda: h.get("0:ouut")):
        with pytest.raises(SelectorError, match="did you mean"):
            use()


def test_an_overwritten_value_is_in_the_mapping_and_cannot_be_read() -> None:
    """The name stays, the table says so, and only its value is refused."""
    h = recorded(sequential(), "*")
    h["1"].zero_()

    assert list(h) == ["0", "1", "2"]
    assert "1" in h
    assert h["0"].shape == (5, 4)
    assert str(h).endswith("overwritten by the program: 1; record(copy=True) keeps copies")
    with pytest.raises(Overwritten):
        dict(h)


def test_two_passes_with_one_backward_have_one_name() -> None:
    """Both gradients are kept and listed under it; to read the one value of the name is an error that names the way."""
    model = sequential()
    with kedge.hook(model, "0:out.grad", kedge.record()) as h:
        (model(torch.ones(1, 3)) + model(torch.ones(1, 3))).sum().backward()

    assert list(h) == ["0:out.grad"]
    assert "0:out.grad" in h
    assert len(h.records("0:out.grad")) == 2
    assert str(h).split()[-1] == "2"
    with pytest.raises(SeveralRecorded, match=r'\.records\("0:out.grad"\) returns them all'):
        dict(h)


def test_reading_keeps_nothing_alive() -> None:
    """Listing, showing and choosing hold no value beyond what they return, so that the next pass frees them."""
    model = sequential()
    with kedge.hook(model, "*", kedge.record()) as h:
        model(torch.ones(1, 3))
        kept = [weakref.ref(k) for s in h.actions[0].by_site.values() for k in s.all()]
        for use in (
            list,
            len,
            str,
            repr,
            dict,
            lambda it: it.items(),
            lambda it: it["*"],
            lambda it: it["0"],
        ):
            use(h)
        model(torch.ones(1, 3))
        gc.collect()

    assert [ref() for ref in kept] == [None] * 3


def test_the_mapping_grows_in_the_block_and_shows_the_newest_pass() -> None:
    """It can be read at any time: before the first value, between passes, after the end, after a failure."""
    model = sequential()
    with (
        pytest.raises(ZeroDivisionError),
        kedge.hook(model, "*, 2:out.grad", kedge.record(keep=None)) as h,
    ):
        assert (list(h), len(h), dict(h)) == ([], 0, {})
        loss = model(torch.ones(1, 3)).sum()
        assert list(h) == ["0", "1", "2"]
        loss.backward()
        assert list(h) == ["0", "1", "2", "2:out.grad"]
        for _ in h:
            model(torch.ones(2, 3))
        assert h["0"].shape == (2, 4)
        assert len(h.records("0")) == 5
        raise ZeroDivisionError
    assert h["0"].shape == (2, 4)
    assert [row.split()[-1] for row in str(h).splitlines()[1:]] == ["1", "5", "5", "5"]


def test_a_handle_is_true_and_equal_to_itself_alone() -> None:
    """`if handle: handle.remove()` removes a hook that has not fired; handles are keys, and `==` compares no tensors."""
    model = sequential()
    with pytest.warns(NeverFiredWarning):
        h = kedge.hook(model, "0", kedge.record())
        assert bool(h)
        assert len(h) == 0
        h.remove()
    a, b = recorded(model, "*"), recorded(model, "*")

    assert [a, b].index(b) == 1
    assert a != b
    assert len({a, b, a}) == 2
    assert isinstance(a, Mapping)
    assert a["*"] != a["*"]


@pytest.mark.parametrize(
    ("actions", "count"), [((torch.zeros_like,), 0), ((kedge.record(), kedge.measure()), 2)]
)
def test_a_hook_without_one_recording_action_is_no_mapping(actions: Any, count: int) -> None:
    """Reading, listing, counting and asking say so, instead of being empty."""
    with kedge.hook(model := sequential(), "0", *actions) as h:
        model(torch.ones(1, 3))
    for use in (
        lambda: h["0"],
        lambda: list(h),
        lambda: len(h),
        lambda: "0" in h,
        lambda: h["*"],
        lambda: h.get("0"),
    ):
        with pytest.raises(ReadError, match=f"this hook has {count} recording actions"):
            use()
    assert repr(h).startswith("<hook ")
    assert bool(h)


def test_values_can_be_saved_and_a_handle_cannot(tmp_path: Any) -> None:
    """`torch.save(dict(acts))` loads with `weights_only`; to copy or pickle the handle itself is an error that says so."""
    h = recorded(sequential(), "*")
    torch.save(dict(h), tmp_path / "acts.pt")
    loaded = torch.load(tmp_path / "acts.pt", weights_only=True)

    assert list(loaded) == list(h)
    assert all(torch.equal(loaded[name], h[name]) for name in h)
    assert copy.copy(h) is h
    for use in (copy.deepcopy, pickle.dumps, lambda it: torch.save(it, io.BytesIO())):
        with pytest.raises(TypeError, match=r"cannot be copied deeply or pickled.*dict\(handle\)"):
            use(h)
    chosen = pickle.loads(pickle.dumps(h["0, 1"]))
    assert list(chosen) == ["0", "1"]
    assert torch.equal(chosen["1"], h["1"])


def test_a_handle_prints_as_a_table() -> None:
    """The terminal shows what a notebook shows; what has no value shows its actions and sites."""
    model = sequential()
    with kedge.session() as s:
        acts, stats = s.hook(model, "*", kedge.record()), s.hook(model, ["0", "1"], kedge.measure())
        plain = s.hook(model, "0", lambda v: None)
        waiting = "<hook record() at 0:out, 1:out, 2:out: fired 0 times>"
        assert str(acts) == repr(acts) == waiting
        assert acts._repr_html_() == acts.ledger()._repr_html_()
        model(torch.zeros(5, 3))

    assert str(acts).splitlines() == [
        "site  shape   dtype    kept",
        "0     [5, 4]  float32     1",
        "1     [5, 4]  float32     1",
        "2     [5, 2]  float32     1",
    ]
    assert repr(acts) == f"{waiting.replace('0 times', '3 times')}\n{acts}"
    assert [line.split()[:3] for line in str(stats).splitlines()] == [
        ["site", "step", "count"],
        ["0:out", "0", "20"],
        ["1:out", "0", "20"],
    ]
    assert str(plain) == repr(plain)
    for handle in (acts, stats):
        rows = Reader(handle._repr_html_()).rows
        assert [" ".join(row) for row in rows] == [
            " ".join(line.split()) for line in str(handle).splitlines()
        ]
    assert str(acts["[01]"]).splitlines() == str(acts).splitlines()[:3]
    assert repr(stats["*"]) == str(stats)
    assert Reader(acts["0, 1"]._repr_html_()).rows == Reader(acts._repr_html_()).rows[:3]


def test_a_long_handle_is_shown_in_part_by_repr_alone() -> None:
    """A prompt shows the first rows of a large model, `print` all."""
    h = recorded(nn.Sequential(*(nn.Identity() for _ in range(40)), nn.Linear(3, 3)), "*")

    assert len(str(h).splitlines()) == 42
    assert len(repr(h).splitlines()) == 15
    assert repr(h).endswith("\n... and 29 more")


def test_statistics_are_plain_figures() -> None:
    """A data frame has a column for each figure, and a row for each site."""
    stats = recorded(sequential(), "*", kedge.measure())
    rows = [dataclasses.asdict(one) for one in stats.values()]

    assert [row["name"] for row in rows] == ["0:out", "1:out", "2:out"]
    assert all(type(value) in (str, int, float) for row in rows for value in row.values())
    assert rows[1]["count"] == 20
    assert rows[1]["rms"] == stats["1"].rms
    assert str(stats["1"].site) == "1:out"
    with pytest.raises(AttributeError, match="rmss"):
        stats["1"].rmss


def test_statistics_make_a_data_frame() -> None:
    """`pandas.DataFrame(stats.values())` is a table of them."""
    pandas = pytest.importorskip("pandas")
    stats = recorded(sequential(), "*", kedge.measure())
    frame = pandas.DataFrame(stats.values(), index=list(stats))

    assert list(frame.index) == ["0", "1", "2"]
    assert frame.loc["1", "rms"] == stats["1"].rms
    assert "site" not in frame.columns
    assert all(frame.dtypes[name].kind in "if" for name in frame.columns if name != "name")


def test_the_newest_step_of_each_site_is_read() -> None:
    """A site that did not fire in the last step shows its last one; steps that were dropped leave the mapping."""
    model = sequential()
    with kedge.session() as s:
        all_steps, two = (
            s.hook(model, "*", kedge.measure()),
            s.hook(model, "*", kedge.measure(keep=2)),
        )
        for use in (model, model[0], model[0]):
            use(torch.ones(1, 3))

    assert {name: one.step for name, one in all_steps.items()} == {"0": 2, "1": 0, "2": 0}
    assert {name: one.step for name, one in two.items()} == {"0": 2}


def test_an_action_of_ones_own_can_be_listed() -> None:
    """An action that has only `read` and `records` is a mapping by the sites that have records."""

    class Largest:
        observes = True

        def __init__(self) -> None:
            self.found: dict[str, float] = {}

        def __call__(self, value: Tensor, event: Any) -> None:
            self.found[str(event.site)] = float(value.detach().max())

        def read(self, name: str, why: Any) -> float:
            return self.found[name if ":" in name else name + ":out"]

        def records(self, name: str) -> list[Any]:
            return [self.found[name]] if name in self.found else []

    with kedge.hook(model := sequential(), "0, 1", Largest()) as h:
        assert dict(h) == {}
        model(torch.ones(1, 3))
    assert list(h) == ["0", "1"]
    assert h["*"].keys() == {"0", "1"}
    assert str(h["*"]) == "0, 1"
    assert repr(h).startswith("<hook ")


def test_names_complete_in_ipython() -> None:
    """After `acts[` the names are offered."""
    assert recorded(sequential(), "*")._ipython_key_completions_() == ["0", "1", "2"]


def test_types_select_among_what_a_hook_on_every_model_recorded() -> None:
    """The types are those of each path's own module, whichever model it is in, and of a parameter's owner."""
    one, other = sequential(), nn.Sequential(nn.Tanh(), nn.Linear(3, 1))
    with kedge.session() as s:
        acts = s.hook(["**", "**:param"], kedge.record())
        mine = s.hook(one, "**", kedge.record())
        theirs = s.hook(other, "**", kedge.record())
        one(torch.ones(2, 3))
        other(torch.ones(2, 3))
    names = acts["**{Linear}"].names()
    assert [name.rpartition(".")[2] for name in names] == ["0", "2", "1"]
    owned = acts["**{Linear}:param"].names()
    assert len(owned) == 6
    assert mine["**{Linear}"].names() == ["0", "2"]
    assert theirs["**{Linear}"].names() == ["1"]
    del s, mine, theirs
    part = one[0]
    del one[0]
    with pytest.raises(
        NotRecorded, match=r'"Sequential.2.weight", which is not a module, or no longer exists'
    ):
        acts["**{Linear}"]
    assert part is not None


def test_a_list_of_names_reads_all_of_them_or_is_an_error() -> None:
    """One that selects nothing is named, as in a selector that hooks."""
    h = recorded(sequential(), "**")
    assert h[["0", "1"]].names() == ["0", "1"]
    assert h["0, nope"].names() == ["0"]
    for wrong in (["0", "nope"], ("nope", "*"), [kedge.select("*"), "nope"]):
        with pytest.raises(
            NotRecorded, match='nothing was recorded under "nope"; the names are "0", "1", "2"'
        ):
            h[wrong]


def test_bytes_are_no_name() -> None:
    """`in` and `get` answer for them as for other objects that are no text."""
    h = recorded(sequential(), "**")
    assert b"0" not in h
    assert h.get(b"0") is None
