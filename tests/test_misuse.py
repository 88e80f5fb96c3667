"""What a newcomer calls wrongly is answered by an error of Kedge: what was asked, what was found, what to do."""

from __future__ import annotations

import ast
import contextlib
import gc
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import kedge
from kedge import figures, recipes
from kedge.calls.arguments import called_as
from kedge.calls.missing_attributes import MissingAttributes
from kedge.errors import KedgeError, WrongCall


class Net(nn.Module):
    """A classifier of images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.fc = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.relu(self.conv(x)).mean((2, 3)))


#: The wrong call, and what the answer says.
WRONG = [
    ("kedge.log(0.93)", "give numbers by name, as in kedge.log(accuracy=0.93)"),
    ("kedge.log({1: 0.93})", "a name is a text, as in kedge.log(accuracy=0.93)"),
    ("kedge.log(accuracy=images)", "a value is a number or a tensor of one element"),
    ("kedge.log(accuracy='0.93')", "a value is a number or a tensor of one element"),
    ("kedge.hook()", "missing a required argument: 'target'; use it as in: kedge.hook(model, "),
    ("kedge.hook(model)", "no action given; hook(model, "),
    (
        "kedge.hook(Net, 'relu', kedge.record())",
        "the class Net; create the model first, as in model = Net(...)",
    ),
    (
        "kedge.hook(model, model.relu, kedge.record())",
        'the module ReLU is not a selector; name it by its path: hook(model, "relu"',
    ),
    (
        "kedge.hook(model, model.fc.weight, kedge.record())",
        'its path: hook(model, "fc.weight:param.grad", action)',
    ),
    (
        "kedge.hook(model, [model.relu], kedge.record())",
        "the module ReLU is not the text of a selector",
    ),
    ("kedge.hook(model, nn.ReLU)", 'modules of a type are selected by "**{ReLU}"'),
    (
        "kedge.hook(model, nn.ReLU, kedge.record())",
        'the class ReLU is not the text of a selector, such as "layer4"; modules of a type are',
    ),
    (
        "kedge.hook(model, [nn.ReLU, nn.Conv2d], kedge.record())",
        'modules of a type are selected by "**{ReLU,Conv2d}"',
    ),
    ("kedge.hook(model, 'Conv2d', kedge.record())", 'are selected by "**{Conv2d}"'),
    ("kedge.hook(model, 'relu.grad', kedge.record())", 'follows a colon: "relu:out.grad"'),
    ("kedge.hook(model, 'fc.weight.grad', print)", 'follows a colon: "fc.weight:param.grad"'),
    ("kedge.hook(model, 'relu:grad', kedge.record())", 'did you mean "relu:out.grad"?'),
    ("kedge.hook(model.relu, kedge.record())", '":out" its own output'),
    ("kedge.hook(model.relu, print)", '":out" its own output'),
    ("kedge.hook(model, {'relu': kedge.record()})", "not in a dict, but in a session"),
    ("kedge.hook(model, 'relu', 'zero')", "did you mean kedge.zero(...)?"),
    ("kedge.hook(model, 'relu', 0)", "use kedge.replace(0)"),
    ("kedge.hook(nn.Sequential(model), -1, print)", 'a path is a text: hook(model, "0", action)'),
    (
        "kedge.hook([model, model], 'relu', kedge.record())",
        "cannot hook a list; for several models, give torch.nn.ModuleList",
    ),
    (
        "kedge.hook('relu', model, kedge.record())",
        'the model comes before the selector: hook(model, "relu", action)',
    ),
    ("kedge.hook(model, 'relu', kedge.record)", "call it, as in kedge.record(...)"),
    ("kedge.hook(model, 'relu', images)", "a Tensor is not an action: it cannot be called"),
    ("kedge.hook(model, 'relu', images)", "use kedge.replace(tensor)"),
    ("kedge.hook(model, 0, kedge.record())", 'a path is a text: "0"'),
    ("kedge.hook(model, None, kedge.record())", "None is not an action"),
    (
        "kedge.hook(model, 'relu', kedge.every(10), kedge.record())",
        "pass it as when=kedge.every(10)",
    ),
    ("kedge.hook(model, 'relu', kedge.at(3), kedge.record())", "pass it as when=kedge.at(3)"),
    (
        "kedge.hook(model, 'relu', kedge.record(), when=10)",
        "when=10 is not a schedule; use when=kedge.every(10)",
    ),
    (
        "kedge.hook(model, 'relu', kedge.record(), every=10)",
        "there is no argument 'every'; it takes target, what, when;",
    ),
    ("kedge.hook(model, site='relu', action=kedge.record())", "there is no argument 'site'"),
    (
        "kedge.hook(loader, 'relu', kedge.record())",
        "cannot hook a DataLoader; a target is a module",
    ),
    (
        "kedge.hook(lambda x: x, 'relu', kedge.record())",
        '"relu": <lambda>() has operations, such as "/relu:out", and no modules or other sites',
    ),
    (
        "kedge.session(model)",
        "session(the module Net): too many positional arguments; it takes strict, on_error;",
    ),
    ("kedge.Session(on_error='no')", 'on_error=\'no\': use "raise" or "warn"'),
    ("kedge.session(on_error='ignore')", 'on_error=\'ignore\': use "raise" or "warn"'),
    ("kedge.session().hook(model)", "no action given"),
    (
        "kedge.record(model, 'relu')",
        'use it as in: with kedge.hook(model, "layer4", kedge.record()) as acts: model(x)',
    ),
    (
        "kedge.record(keep='all')",
        "record(keep='all') is not a number; use 1 or more, or None for all",
    ),
    ("kedge.measure(model)", "measure(the module Net) is unknown; use 'full', 'norm' or 'finite'"),
    ("kedge.measure('mean')", "measure('mean') is unknown"),
    ("kedge.measure('relu')", 'as in kedge.hook(model, "layer4", kedge.measure())'),
    ("kedge.measure().__enter__()", 'with kedge.hook(model, "**", kedge.measure()) as stats:'),
    ("kedge.record().__enter__()", 'with kedge.hook(model, "layer4", kedge.record()) as acts:'),
    ("kedge.add()", "missing a required argument: 'term'; use it as in: kedge.hook("),
    (
        "kedge.add(model)",
        "add(the module Net): give a number or a tensor; the model and the place are arguments of kedge.hook",
    ),
    ("kedge.scale('2')", "scale('2'): give a number or a tensor"),
    (
        "kedge.scale(model, 'relu', 2)",
        "scale(the module Net, 'relu', 2): too many positional arguments; it takes factor;",
    ),
    ("kedge.clamp()", "pass min, max or both"),
    ("kedge.clamp('1')", "clamp('1'): give a number or a tensor"),
    ("kedge.replace(None)", "replace(None): give a tensor, a number, or a function"),
    ("kedge.replace(Net)", "replace(the class Net): give a tensor"),
    (
        "kedge.zero(model)",
        "zero(the module Net): too many positional arguments; it takes no arguments",
    ),
    ("kedge.skip(2)", "skip(2): give a tensor, a function of the module's inputs, or nothing"),
    ("kedge.skip(Net)", "skip(the class Net): give a tensor, a function"),
    (
        "kedge.skip(model, 'relu', 2)",
        "skip(the module Net, 'relu', 2): too many positional arguments; it takes value;",
    ),
    ("kedge.error_if(True)", "give it without calling it, as in kedge.error_if(kedge.nonfinite)"),
    ("kedge.error_if(kedge.nonfinite(images))", "error_if(a Tensor): the condition is a function"),
    (
        "kedge.error_if(kedge.error_if(kedge.nonfinite))",
        "error_if(an ErrorIf): the condition is a function",
    ),
    (
        "kedge.nonfinite(model)",
        "nonfinite(the module Net): give a tensor; on a model it is a condition",
    ),
    ("kedge.from_hook(model)", "from_hook takes a function, not the module Net"),
    (
        "kedge.from_hook(kedge.record())",
        "record() is an action already: pass it to kedge.hook as it is",
    ),
    ("kedge.packed(lambda x: x)", "missing a required argument: 'unpack'; it takes pack, unpack;"),
    ("kedge.packed('a', 'b')", "packed(pack='a'): pack must be a function"),
    ("kedge.every('10')", "every(n='10'): n is a number of steps, as in kedge.every(10)"),
    ("kedge.every(0)", "the distance between two steps must be 1 or more"),
    (
        "kedge.at([1, 2])",
        "at(a list): give the numbers of the steps one by one, as in kedge.at(0, 10, 20)",
    ),
    ("kedge.at()", "give the numbers of the steps one by one"),
    (
        "kedge.extract(model)",
        "missing a required argument: 'sites'; it takes model, sites, rename,",
    ),
    ("kedge.extract(Net, 'relu')", "not the class Net; create the model first"),
    ("kedge.extract('relu', model)", "extract takes a model first, as in extract(model, "),
    ("kedge.extract(model, model.relu)", "the module ReLU is not a selector"),
    (
        "kedge.extract(model, [model.relu])",
        "print(kedge.sites(model)) lists the paths of its modules",
    ),
    ("kedge.extract(model, model.relu)", 'such as "relu" for this one'),
    ("kedge.extract(model, nn.ReLU)", 'modules of a type are selected by "**{ReLU}"'),
    ("kedge.extract(model, {model.relu: 'a'})", "the module ReLU is not the text of a selector"),
    (
        "kedge.extract(model, {'hidden': 'relu'})",
        "the dict goes from a selector to a name: extract(model, {'relu': 'hidden'})",
    ),
    ("kedge.extract(model, 'relu').__enter__()", "this cannot be used in a with statement"),
    ("kedge.extract(model, images)", "a Tensor is not a selector"),
    ("kedge.extract(model, 'relu', images)", "too many positional arguments"),
    (
        "kedge.extract(model, layers=['relu'])",
        "there is no argument 'layers'; it takes model, sites",
    ),
    (
        "kedge.extract(model, 'relu', device='gpu')",
        "device='gpu' is not a device; give one such as",
    ),
    ("kedge.extract(model, 'relu', dtype='float16')", "dtype='float16': give a torch.dtype"),
    ("kedge.extract(model, 'relu', rename='x')", "rename='x': give a dict"),
    (
        "kedge.examine(Net, images)",
        "not the class Net; create the model first, as in model = Net(...)",
    ),
    ("kedge.examine(model, images, optimizer='sgd')", "a torch.optim.Optimizer, or a list of them"),
    ("kedge.audit(Net)", "not the class Net; create the model first, as in model = Net(...)"),
    ("kedge.audit(images, 'x')", "audit(names='x'): names is a model, or a dict of tensors"),
    (
        "kedge.audit(images).remove()",
        "whose hooks could be removed: call kedge.audit(model).remove()",
    ),
    ("kedge.operations(Net, images)", "not the class Net; create the model first"),
    ("kedge.operations([model], images)", "give torch.nn.ModuleList"),
    ("kedge.Cpu('cuda')", "Cpu(rebuild='cuda'): rebuild must be True or False"),
    ("kedge.Disk(model)", "Disk(the module Net): path must be a folder, or None"),
    (
        "kedge.Disk(folder='x')",
        "there is no argument 'folder'; it takes path, rebuild, uncached, checksum;",
    ),
    ("kedge.Rebuild(model)", "use it as in: kedge.offload(model, to=kedge.Rebuild())"),
    ("kedge.offload(Net)", "kedge.offload takes a torch.nn.Module, not the class Net"),
    ("kedge.offload(kedge.Cpu())", "takes a destination as to=: kedge.offload(model, to=Cpu("),
    (
        "kedge.offload(model, kedge.Cpu())",
        "takes a destination as to=: kedge.offload(model, to=Cpu(",
    ),
    (
        "kedge.offload(model, device='cpu')",
        "there is no argument 'device'; it takes model, where, to,",
    ),
    (
        "kedge.saved(model, images)",
        "saved(the module Net, a Tensor): too many positional arguments",
    ),
    ("kedge.saved(model, images)", "use it as in: kedge.saved(model)(images)"),
    (
        "kedge.saved(model).__enter__()",
        "print(kedge.saved(model)(images)). To keep less for backward",
    ),
    ("kedge.compare('a.kedge', 'b.kedge')", "kedge diff A B in a terminal says where two runs"),
    ("kedge.rules.check('run.kedge')", "open it with kedge.Recording.open("),
    ("kedge.hook(weight, 'grad', kedge.scale(2))", 'a kind follows a colon: ":grad"'),
    ("recording.series('relu:out')", 'use it as in: recording.series("layer4:out", "mean")'),
    ("figures.attributions(images)", "use it as in: figures.attributions("),
    ("figures.feature_maps()", 'use it as in: figures.feature_maps(acts["conv1"])'),
    ("recipes.patch(model, images, images, 'relu', 3)", "metric is a function from the model's"),
    ("recipes.ablate(model, 'relu', head=3)", 'recipes.ablate(model, "layer4", positions=[3]'),
    (
        "kedge.extract(model, {'relu': recipes.Mean()})",
        "a reducer is for a data set: dataset(loader, folder, reduce={name: reducer})",
    ),
    (
        "kedge.extract(model, 'relu').dataset(loader, 'nowhere', reduce='mean')",
        "reduce='mean': give a dict of reducers by the names of values",
    ),
    ("kedge.saved(Net)", "kedge.saved takes a module or a function, not the class Net"),
    ("kedge.saved(model(images))", "kedge.saved takes a module or a function, not a Tensor"),
    (
        "kedge.saved(model, loss=images)",
        "saved(loss=a Tensor): loss is a function from the output to the loss",
    ),
    ("kedge.saved(model, loss=nn.MSELoss)", "saved(loss=the class MSELoss)"),
    ("kedge.saved(model, min_bytes='64 KiB')", "min_bytes is a number of bytes"),
    ("kedge.select(model)", "the module Net is not the text of a selector"),
    ("kedge.select(None)", "None is not the text of a selector"),
    ("kedge.select(model, 'relu')", "too many positional arguments; it takes text;"),
    ("kedge.sites()", "missing a required argument: 'model'; use it as in: kedge.sites(model)"),
    ("kedge.sites(Net)", "not the class Net; create the model first"),
    (
        "kedge.sites(model, 'relu')",
        "arguments of its call, as in kedge.sites(model, x); for the sites of",
    ),
    ("kedge.Recording('run.kedge')", "use it as in: kedge.Recording.open("),
    ("kedge.Recording.open(model)", "Recording.open(the module Net): give the folder"),
    ("kedge.Finding()", "missing a required argument: 'code'"),
    ("kedge.watch(model)", "every model that runs in the block is recorded, so none is given"),
    ("kedge.watch(model, 'run.kedge')", "use it as in: with kedge.watch("),
    ("kedge.watch(site='relu')", "there is no argument 'site' (did you mean sites?)"),
    ("kedge.watch(sites=None)", "None is not the text of a selector"),
    ("kedge.watch(every='10')", "every(n='10'): n is a number of steps"),
    (
        "kedge.watch(budget='3%')",
        "watch(budget='3%'): budget is a share of the run's time, such as 0.03, or None",
    ),
    ("recipes.saliency(Net)", "not the class Net; create the model first"),
    ("recipes.saliency(model, images)", "what the model is called with comes in a second call"),
    (
        "recipes.saliency(model, layer='conv')",
        "there is no argument 'layer'; it takes model, target, wrt;",
    ),
    ("recipes.saliency(model, target=object())(images)", "target=an object: give a class"),
    ("recipes.grad_cam(model)", "missing a required argument: 'site'"),
    (
        "recipes.grad_cam(model, model.conv)",
        "the module Conv2d is not the name of a place in the model",
    ),
    ("recipes.grad_cam(model, 'conv', size=7)", "size=7: give (rows, columns)"),
    (
        "recipes.grad_cam(model, 'conv', layout=(3, 3))",
        "layout=a tuple: give a function of the value",
    ),
    ("recipes.Tokens(14)", "Tokens(grid=14): grid is the numbers of rows and columns"),
    ("recipes.deep_lift(model, baseline='black')", "baseline is a number or a tensor"),
    ("recipes.integrated_gradients(model, steps=0)", "integrated_gradients(steps=0"),
    ("recipes.route(model, 'conv')", "missing a required argument: 'into'"),
    (
        "recipes.route(model, 'conv', into='fc', by=3)",
        "route(by=3): by is a function of two values",
    ),
    ("recipes.sample_gradients(model, images)", "missing a required argument: 'loss'"),
    ("recipes.sample_gradients(model, images, 3)", "sample_gradients(loss=3): loss is a function"),
    ("recipes.Interventions(model)", "Interventions(the module Net): give a dict of selectors"),
    ("recipes.Interventions({'fc': 2})", '2 at "fc" is not an action'),
    ("recipes.Interventions.load('no/such/file')", "if the file exists, it is incomplete"),
    ("recipes.blocks(images, images)", "blocks takes a model first"),
    ("recipes.logit_lens(model, images)", "no list of blocks of one class"),
    ("recipes.smoothgrad(model)", "smoothgrad takes an attribution, not the module Net"),
    ("recipes.smoothgrad(recipes.saliency(model), samples='5')", "samples='5'"),
    ("recipes.ablate(model)", "missing a required argument: 'sites'; it takes model, sites,"),
    (
        "recipes.means(model, loader)",
        "means(the module Net, a DataLoader): missing a required argument: 'inputs'",
    ),
    (
        "recipes.patch(model, images, images)",
        'use it as in: recipes.patch(model, clean, corrupted, "layer4", metric)',
    ),
    ("recipes.steer(model, 'relu')", "missing a required argument: 'direction'"),
    ("recipes.contrast(model, 'relu', images)", "missing a required argument: 'away'"),
    ("recipes.resample(model)", "resample(seed=the module Net): seed is a whole number"),
]


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the wrong calls name."""
    torch.manual_seed(0)
    images = torch.rand(8, 1, 8, 8)
    loader = DataLoader(TensorDataset(images), batch_size=4)
    return {
        "kedge": kedge,
        "recipes": recipes,
        "figures": figures,
        "weight": nn.Parameter(torch.ones(2)),
        "recording": kedge.Recording.build([], [], []),
        "nn": nn,
        "Net": Net,
        "model": Net().eval(),
        "images": images,
        "loader": loader,
    }


@pytest.mark.parametrize(("wrong", "answer"), WRONG, ids=lambda text: text[:60])
def test_a_wrong_call_is_answered(wrong: str, answer: str, names: dict[str, Any]) -> None:
    """An error of Kedge, in which no module or tensor is printed at length."""
    with pytest.raises(KedgeError) as told:
        eval(wrong, names)

    assert answer in str(told.value)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 400


def _called(text: str) -> Iterator[str]:
    """Yield the names of the root that a call uses."""
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "kedge"
        ):
            yield node.attr


def test_every_function_of_the_root_is_called_wrongly() -> None:
    """None is left out of the list above; `everywhere` is not called."""
    assert {name for wrong, _ in WRONG for name in _called(wrong)} >= {*kedge.__all__} - {
        "everywhere"
    }


@pytest.mark.parametrize(
    "call",
    [kedge.record, kedge.measure, lambda: kedge.saved(Net()), lambda: kedge.extract(Net(), "fc")],
    ids=["record", "measure", "saved", "extract"],
)
def test_what_is_no_block_says_so_in_a_with_statement(call: Any) -> None:
    """Not Python's word of a protocol, but what to write."""
    with pytest.raises(WrongCall, match="cannot be used in a with statement; "), call():
        pass


def test_an_error_inside_a_function_is_not_taken_for_a_wrong_call(names: dict[str, Any]) -> None:
    """A TypeError of the program's own code passes unchanged, also one about arguments."""

    def loss() -> None:
        """Take nothing."""

    with pytest.raises(
        TypeError, match=r"loss\(\) takes 0 positional arguments but 1 was given"
    ) as told:
        kedge.saved(names["model"], loss=loss)(names["images"])  # type: ignore[arg-type]
    assert not isinstance(told.value, WrongCall)
    assert "loss=lambda output: loss_fn(output, labels)" in told.value.__notes__[0]


@pytest.mark.parametrize(
    "call",
    [
        lambda model, given: kedge.extract(model, "relu")(given),
        lambda model, given: kedge.saved(model)(given),
        lambda model, given: kedge.operations(model, given),
        lambda model, given: recipes.saliency(model)(given),
        lambda model, given: recipes.smoothgrad(recipes.saliency(model))(given),
    ],
    ids=["extract", "saved", "operations", "saliency", "smoothgrad"],
)
def test_a_loader_and_another_device_are_noted(call: Any, names: dict[str, Any]) -> None:
    """The model's own error stays as it is, and gets a note of what to give instead."""
    with pytest.raises(TypeError, match="DataLoader") as told:
        call(names["model"], names["loader"])
    assert told.value.__notes__ == [
        "[kedge] a DataLoader was given where the model takes a batch; use next(iter(loader)), or a loop over it"
    ]

    model = Net().to("meta").eval()
    with pytest.raises(RuntimeError) as elsewhere:
        call(model, names["images"].requires_grad_())
    note = '[kedge] the model is on meta, and an argument is on cpu; move it with .to("meta")'
    assert elsewhere.value.__notes__ == [note]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grad_cam", "did you mean kedge.recipes.grad_cam?"),
        ("gradcam", "did you mean kedge.recipes.grad_cam?"),
        ("Extract", "did you mean extract?"),
        ("recrd", "did you mean record"),
        ("sesion", "did you mean session"),
        ("no_name_like_this", "has no attribute 'no_name_like_this'"),
    ],
)
def test_a_name_that_there_is_not_gets_the_nearest(name: str, message: str) -> None:
    """Also those of `kedge.recipes`."""
    with pytest.raises(AttributeError) as told:
        getattr(kedge, name)
    assert message in str(told.value)


@pytest.mark.parametrize(
    ("tried", "message"),
    [
        ("recording.loss", 'recording.series("loss", "mean") has it'),
        ("recording.findings", "kedge.rules.check(recording) returns them"),
        ("recording.plot", "kedge report RUN --html"),
        ("block.losses", "kedge.Recording.open(run.recording) has what was recorded"),
        ("block.report", "kedge report RUN --html"),
        ("acts.value", 'acts["layer4"] is a value'),
        ("acts.close", "remove() removes the hook"),
    ],
)
def test_an_attribute_of_another_tool_is_answered(
    tried: str, message: str, names: dict[str, Any]
) -> None:
    """On what Kedge returns; others are refused in Python's own words."""
    acts = kedge.hook(names["model"], "relu", kedge.record())
    given = {**names, "block": kedge.watch("run.kedge"), "acts": acts}
    with pytest.raises(AttributeError) as told:
        eval(tried, given)
    assert f"object has no attribute {tried.partition('.')[2]!r}; " in str(told.value)
    assert message in str(told.value)

    with pytest.raises(AttributeError, match="^'Hooked' object has no attribute 'nothing'$"):
        acts.nothing  # type: ignore[attr-defined]
    acts.session.end(quiet=True)


def test_a_property_that_fails_by_an_attribute_gives_its_own_error() -> None:
    """It is not taken for an attribute that there is not."""

    class Result(MissingAttributes):
        _instead_of: ClassVar[Mapping[str, str]] = {"loss": "there is none"}

        @property
        def steps(self) -> int:
            return self.inner  # type: ignore[attr-defined,no-any-return]

    with pytest.raises(AttributeError, match="no attribute 'inner'$"):
        Result().steps
    assert not hasattr(Result(), "loss")


def test_a_batch_with_its_labels_is_noted(names: dict[str, Any]) -> None:
    """The error of the model or of the loss stays as it is."""
    labels = torch.zeros(8, dtype=torch.long)
    model, images = names["model"], names["images"]
    with pytest.raises(TypeError) as told:
        kedge.examine(model, (images, labels), loss=nn.functional.cross_entropy)
    assert "labels are for the loss: loss=lambda output" in told.value.__notes__[0]
    with pytest.raises(TypeError) as told:
        kedge.examine(model, images, loss=nn.functional.cross_entropy)
    assert "loss is called with the output alone" in told.value.__notes__[0]


def test_a_account_that_was_not_called_says_so(names: dict[str, Any]) -> None:
    """The report is the result of the second call, with the model's arguments."""
    with pytest.raises(
        AttributeError,
        match=r"needs a call of the model first: kedge\.saved\(model\)\(images\)\.total",
    ):
        kedge.saved(names["model"]).total


def test_an_error_inside_a_function_keeps_nothing_alive() -> None:
    """When it has been handled, what its frames held is freed at once, not when garbage is next collected."""

    class Batch:
        """What a program holds as it fails."""

    held: list[weakref.ref[Batch]] = []

    @called_as("function()")
    def function() -> None:
        batch = Batch()
        held.append(weakref.ref(batch))
        raise TypeError("the program's own")

    gc.disable()
    try:
        with contextlib.suppress(TypeError):
            function()
        assert held[0]() is None
    finally:
        gc.enable()
