"""Selectors that cannot be read or that stand for nothing: what the messages say."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import Tensor, nn

from kedge.errors import NoSiteMatched, NoSuchKind, SelectorError
from kedge.sites.select import Selector
from kedge.sites.site import KINDS, MODULE_KINDS

ALL = f"kinds are {', '.join(KINDS)}"
OF_MODULES = f"kinds of modules: {', '.join(MODULE_KINDS)}"


@pytest.mark.parametrize(
    ("text", "column", "problem", "advice"),
    [
        (
            "",
            1,
            "it is empty",
            '":out" selects the output of the model itself, "**:out" that of every module',
        ),
        (
            "   ",
            1,
            "it is empty",
            '":out" selects the output of the model itself, "**:out" that of every module',
        ),
        ("a,", 3, "a path is missing here", 'write ":out" for the root, "**" for everything'),
        ("a, ,b", 4, "a path is missing here", 'write ":out" for the root, "**" for everything'),
        ("a..b", 1, "an empty segment between dots", "the path was read as ['a', '', 'b']"),
        (".a", 1, "an empty segment between dots", "the path was read as ['', 'a']"),
        ("a.", 1, "an empty segment between dots", "the path was read as ['a', '']"),
        ("x, h.**b", 6, '"**" must stand alone between dots', 'within a name write "*"'),
        ("a[12", 2, "this bracket is never closed", ""),
        ("a[]", 2, "empty brackets match nothing", ""),
        ("a[!]", 2, "empty brackets match nothing", ""),
        ("a{Conv2d", 2, 'no "}" closes this', ""),
        ("a{ }", 2, "there is nothing between these", ""),
        ("a:out[0", 6, 'no "]" closes this', ""),
        ("a:out[]", 6, "there is nothing between these", ""),
        ("a#", 3, 'a number must follow "#"', 'calls are counted from 0: "encoder#2:out"'),
        ("a#x:out", 3, 'a number must follow "#"', 'calls are counted from 0: "encoder#2:out"'),
        ("a/:out", 3, 'the name of an operation must follow "/"', 'such as "layer1.0/relu:out"'),
        ("a:otu", 3, 'unknown kind "otu"', f'did you mean ":out"? {ALL}'),
        ("a:param.gard", 3, 'unknown kind "param.gard"', f'did you mean ":param.grad"? {ALL}'),
        ("a:", 3, 'unknown kind ""', ALL),
        ("a:xyz", 3, 'unknown kind "xyz"', ALL),
        (
            "a b",
            3,
            'unexpected "b"',
            'a comma joins two selectors, and a colon stands before a kind: "a, b:in"',
        ),
        ("a:input", 3, 'unknown kind "input"', f'did you mean ":in"? {ALL}'),
        ("a:grad_output", 3, 'unknown kind "grad_output"', f'did you mean ":out.grad"? {ALL}'),
        ("a:data", 3, 'unknown kind "data"', f'did you mean ":param"? {ALL}'),
        (
            "a/0",
            3,
            '"0" is not the name of an operation, which is a function\'s',
            'a module inside another has a dot before it, such as "layer1.0"',
        ),
        ("a:out]", 3, 'unknown kind "out]"', f'did you mean ":out"? {ALL}'),
        ("a]", 2, 'unexpected "]"', ""),
        ("a:out[b][0]", 9, 'unexpected "["', 'dots lead into a structure: "a:out[b.0]"'),
        (
            "a:in[by].grad",
            9,
            'unexpected "."',
            'a leaf stands after the whole kind: "a:in.grad[by]"',
        ),
        ("a:out[b].data", 9, 'unexpected "."', ""),
        (
            "!a, !b",
            1,
            'every part is excluded with "!"',
            'first select sites: "**:out, !**{Dropout}"',
        ),
        ("a\\", 2, "nothing follows the backslash", ""),
    ],
)
def test_text_that_cannot_be_read_is_pointed_at(
    text: str, column: int, problem: str, advice: str
) -> None:
    """The message says what is wrong, shows the text with a caret under the place, and what to write."""
    with pytest.raises(SelectorError) as caught:
        Selector(text)

    lines = [
        f"cannot read the selector, column {column}: {problem}",
        f"  {text}",
        "  " + " " * (column - 1) + "^",
    ]
    assert str(caught.value) == "\n".join([*lines, *([advice] if advice else [])])


@pytest.mark.parametrize(("text", "column"), [("a[z-a]", 2), ("a[b--c]", 2), ("x, b[9-0]:in", 5)])
def test_a_class_of_characters_that_means_nothing_is_pointed_at(text: str, column: int) -> None:
    """Brackets that no regular expression could stand for are an error of the text, found when it is read."""
    with pytest.raises(SelectorError, match=rf"^cannot read the selector, column {column}: "):
        Selector(text)


@pytest.mark.parametrize("text", ["a[b&&c]", "a[b||c]", "a[b~~c]"])
def test_a_class_of_characters_takes_each_character_for_itself(text: str) -> None:
    """Doubled characters in brackets have no meaning, now or in a later Python."""
    assert [s.path for s in Selector(text).on(nn.ModuleDict({"ab": nn.ReLU()}))] == ["ab"]


def test_an_empty_name_among_types_is_pointed_at() -> None:
    """A comma too many between braces is an error of the text."""
    with pytest.raises(SelectorError, match=r"^cannot read the selector, column 3: "):
        Selector("**{Conv2d,,Linear}")


class Net(nn.Module):
    """Something of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2 = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        self.blocks, self.none = nn.ModuleList([nn.ReLU(), nn.ReLU()]), nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        """Never called here: a site needs only a module that could be."""
        return x


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "layr1",
            NoSiteMatched,
            '"layr1" matches nothing in this model; the nearest paths are "layer1", "layer2", "blocks.1"',
        ),
        (
            "layr1:in",
            NoSiteMatched,
            '"layr1:in" matches nothing in this model; the nearest paths are "layer1", "layer2", "blocks.1"',
        ),
        (
            "layer1.wieght:param",
            NoSiteMatched,
            '"layer1.wieght:param" matches nothing in this model; the nearest paths are "layer1.weight", "layer2.weight", "layer1.bias"',
        ),
        (
            "**{Conv2d}",
            NoSiteMatched,
            '"**{Conv2d}" matches nothing in this model; its modules are of types Linear, ModuleList, Net, ReLU',
        ),
        (
            "qqq",
            NoSiteMatched,
            '"qqq" matches nothing in this model; the nearest paths are "layer1", "layer2", "blocks.0"',
        ),
        (
            "ReLU",
            NoSiteMatched,
            '"ReLU" matches nothing in this model; modules of this type are selected by "**{ReLU}"',
        ),
        (
            "blocks.relu:out.grad",
            NoSiteMatched,
            '"blocks.relu:out.grad" matches nothing in this model; modules of this type are selected by '
            '"blocks.**{ReLU}:out.grad"; the nearest paths are "blocks.1", "blocks.0"; '
            'a function that a forward calls has a slash before it: "blocks/relu"',
        ),
        (
            "nn.Linear:in",
            NoSiteMatched,
            '"nn.Linear:in" matches nothing in this model; modules of this type are selected by "**{Linear}:in"',
        ),
        (
            "{ReLU}",
            NoSiteMatched,
            '"{ReLU}" matches nothing in this model; did you mean "**{ReLU}"?',
        ),
        (
            "layer1, blocks.*{nn.relu}:in",
            NoSiteMatched,
            '"blocks.*{nn.relu}:in" matches nothing in this model; did you mean "blocks.*{ReLU}:in"?',
        ),
        (
            "layer1.grad",
            NoSiteMatched,
            '"layer1.grad" matches nothing in this model; the kind of a value follows a colon: "layer1:out.grad"',
        ),
        (
            "blocks.0.in.grad",
            NoSiteMatched,
            '"blocks.0.in.grad" matches nothing in this model; the kind of a value follows a colon: "blocks.0:in.grad"',
        ),
        (
            "layer1.weight.grad",
            NoSiteMatched,
            '"layer1.weight.grad" matches nothing in this model; the kind of a value follows a colon: "layer1.weight:param.grad"',
        ),
        (
            "layer3.weight.grad",
            NoSiteMatched,
            '"layer3.weight.grad" matches nothing in this model; the kind of a value follows a colon, and the nearest is '
            '"layer2.weight:param.grad"',
        ),
        (
            "blocks.*.grad",
            NoSiteMatched,
            '"blocks.*.grad" matches nothing in this model; the kind of a value follows a colon: "blocks.*:out.grad"',
        ),
        (
            "layer1:grad",
            NoSuchKind,
            f'"layer1:grad": :grad belongs to tensors and nodes; a model has {", ".join(KINDS)}; did you mean "layer1:out.grad"?',
        ),
        (
            "layer1.weight:acc",
            NoSuchKind,
            f'"layer1.weight:acc": :acc belongs to tensors and nodes; a model has {", ".join(KINDS)}; '
            'did you mean "layer1.weight:param.acc"?',
        ),
        (
            "layer1:pre",
            NoSuchKind,
            f'"layer1:pre": :pre belongs to tensors and nodes; a model has {", ".join(KINDS)}',
        ),
        (
            "weight",
            NoSiteMatched,
            '"weight" matches nothing in this model; parameters have a kind: "**.weight:param", "**.weight:param.grad"',
        ),
        (
            "layer1, !layr2",
            NoSiteMatched,
            '"!layr2" matches nothing in this model; the nearest paths are "layer2", "layer1"',
        ),
        (
            "layer1, !**",
            NoSiteMatched,
            '"layer1, !**" leaves no site: its exclusions remove everything that it selects',
        ),
        (
            "layer1.weight",
            NoSuchKind,
            '"layer1.weight" is a parameter and has no :out; it has "layer1.weight:param", "layer1.weight:param.grad", '
            '"layer1.weight:param.acc", "layer1.weight:state"',
        ),
        (
            "layer1.weight:in.grad",
            NoSuchKind,
            '"layer1.weight" is a parameter and has no :in.grad; it has "layer1.weight:param", "layer1.weight:param.grad", '
            '"layer1.weight:param.acc", "layer1.weight:state"',
        ),
        (
            "layer1:param.grad",
            NoSuchKind,
            '"layer1" is a module and has no :param.grad; its parameters are layer1.weight, layer1.bias; '
            + OF_MODULES,
        ),
        (
            "blocks.0:param",
            NoSuchKind,
            f'"blocks.0" is a module and has no :param; it owns none; {OF_MODULES}',
        ),
        (
            "blocks",
            NoSuchKind,
            '"blocks" is a ModuleList, which holds modules and is never called itself; hook the modules inside: blocks.0, blocks.1',
        ),
        (
            "none:in",
            NoSuchKind,
            '"none:in" is a ModuleList, which holds modules and is never called itself; hook the modules inside: it is empty',
        ),
        (
            "blocks.0/relu:saved",
            NoSuchKind,
            '"blocks.0/relu:saved": an operation has no :saved; it has :out, :in, :out.grad, :in.grad',
        ),
    ],
)
def test_a_selector_that_stands_for_nothing_is_an_error(
    text: str, error: type[Exception], message: str
) -> None:
    """The message names what was asked and the nearest thing that there is."""
    with pytest.raises(error) as caught:
        Selector(text).on(Net())

    assert type(caught.value) is error
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("thing", "name"),
    [(3, "3"), ("layer1", "'layer1'"), (None, "None"), (nn.Linear, "the class Linear; create .*")],
)
def test_a_selector_resolves_on_modules_only(thing: Any, name: str) -> None:
    """What is not a module has no sites."""
    with pytest.raises(NoSiteMatched, match=f"^selectors need a torch.nn.Module, not {name}$"):
        Selector("**").on(thing)


def test_a_model_without_modules_inside_has_nothing_near() -> None:
    """The message says so when there is no path to offer."""
    with pytest.raises(
        NoSiteMatched,
        match=r'^"a" matches nothing in this model; the nearest paths are none: it is empty$',
    ):
        Selector("a").on(nn.ModuleList())


@pytest.mark.parametrize(("text", "site"), [("relu", "/relu"), ("0.softmax:out.grad", "0/softmax")])
def test_the_error_about_a_function_taken_for_a_module_writes_it_with_its_slash(
    text: str, site: str
) -> None:
    """`F.relu` is no module, and its path would not be found among those nearest."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(NoSiteMatched) as caught:
        Selector(text).on(model)

    assert str(caught.value).endswith(
        f'; a function that a forward calls has a slash before it: "{site}"'
    )


@pytest.mark.parametrize("text", ["relo", "1.relu", "relu:param", "relu/add"])
def test_the_error_about_what_is_no_function_has_no_slash(text: str) -> None:
    """A slash would not help there."""
    with pytest.raises(NoSiteMatched) as caught:
        Selector(text).on(nn.Sequential(nn.Linear(2, 2)))

    assert "slash" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ReLU", r'"([^"]+)"$'),
        ("blocks.ReLU:in", r'by "([^"]+)"'),
        ("*{relu}", r'mean "([^"]+)"'),
        ("layer1.grad", r'colon: "([^"]+)"$'),
        ("layer1.bias.data", r'colon: "([^"]+)"$'),
        ("blocks.1.output", r'colon: "([^"]+)"$'),
        ("layer1:grad", r'mean "([^"]+)"'),
        ("weight", r'kind: "([^"]+)"'),
    ],
)
def test_what_a_message_says_to_write_selects_something(text: str, says: str) -> None:
    """It can be pasted."""
    model = nn.ModuleDict(
        {"layer1": nn.Linear(2, 2), "blocks": nn.Sequential(nn.ReLU(), nn.ReLU())}
    )
    with pytest.raises((NoSiteMatched, NoSuchKind)) as caught:
        Selector(text).on(model)

    (written,) = re.findall(says, str(caught.value))
    assert len(Selector(written).on(model)) > 0


def test_a_class_of_modules_is_written_as_the_site_language_has_it() -> None:
    """One class or several, where the text of a selector belongs."""
    with pytest.raises(SelectorError, match=r'; modules of a type are selected by "\*\*{ReLU}"$'):
        Selector(nn.ReLU)  # type: ignore[arg-type]
    with pytest.raises(SelectorError, match=r'selected by "\*\*{ReLU,Linear}"$'):
        Selector(["layer1", nn.ReLU, nn.Linear])  # type: ignore[list-item]
