"""``kedge sites``: what a program's models offer."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable

Kedge = Callable[..., subprocess.CompletedProcess[str]]
Script = Callable[..., str]

TWO = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)
        def forward(self, x):
            return self.fc(x)

    net, other = Net(), nn.Tanh()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    print("training")
    for _ in range(10**9):
        other(net(torch.ones(1, 2))).sum().backward()
        optimizer.step()
"""


def test_all_models_of_the_first_step_are_listed(kedge: Kedge, script: Script) -> None:
    """The list is all of stdout; the program is stopped after its first step."""
    done = kedge("sites", script(TWO))

    assert (done.stderr, done.returncode) == ("training\n", 0)
    lines = done.stdout.splitlines()
    assert [line.split()[0] if line else "" for line in lines] == [
        "Net", "", "path", '""', "fc", "fc.weight", "fc.bias", "", "Tanh", "", "path", '""',
    ]  # fmt: skip
    assert lines[0] == "Net (3 parameters)"
    assert lines[8] == "Tanh (0 parameters, recorded as other.*)"
    assert ":out" in lines[3]


def test_the_first_step_may_be_taken_by_a_thread(kedge: Kedge, script: Script) -> None:
    """The main thread's last line is not the end of the program, and the thread ends without a traceback."""
    in_thread = TWO.replace("for _", "def train():\n      for _").replace(
        "        other(", "          other("
    )
    in_thread = in_thread.replace("        optimizer.step", "          optimizer.step")
    start = "    import threading\n    threading.Thread(target=train).start()\n"
    done = kedge("sites", script(in_thread + start))

    assert (done.stderr, done.returncode) == ("training\n", 0)
    assert done.stdout.startswith("Net (3 parameters)\n")


def test_the_list_is_printed_as_json(kedge: Kedge, script: Script) -> None:
    """One object for each model, with every module and parameter, in any encoding."""
    done = kedge("sites", "--json", script(TWO), env={**os.environ, "PYTHONIOENCODING": "latin-1"})

    assert (done.stderr, done.returncode) == ("training\n", 0)
    net, tanh = json.loads(done.stdout)
    assert (net["model"], net["parameters"], net["prefix"], tanh["prefix"]) == (
        "Net",
        3,
        None,
        "other",
    )
    assert [site["path"] for site in net["sites"]] == ["", "fc", "fc.weight", "fc.bias"]
    assert net["sites"][2] == {
        "path": "fc.weight",
        "type": "Parameter",
        "shape": [1, 2],
        "kinds": ["param", "param.grad", "param.acc", "state"],
        "also": [],
        "trainable": True,
    }


def test_chosen_sites_are_listed_alone(kedge: Kedge, script: Script) -> None:
    """The filter goes by the names that a recording has, and models without a chosen site are left out."""
    name = script(TWO)
    for text, found in {
        "fc": [["fc", "fc.weight", "fc.bias"]],
        "**{Linear}:param": [["fc.weight", "fc.bias"]],
        "oth": [[""]],
        "**:out,!fc": [[""], [""]],
    }.items():
        done = kedge("sites", "--json", "--sites", text, name)
        assert (done.stderr, done.returncode) == ("training\n", 0)
        assert [[site["path"] for site in one["sites"]] for one in json.loads(done.stdout)] == found

    wrong = kedge("sites", "--sites", "fk", name)
    assert (
        wrong.stderr
        == 'training\nkedge: "fk" selects nothing in the models of this program; the nearest are "fc"\n'
    )
    assert (wrong.stdout, wrong.returncode) == ("", 2)


def test_without_a_model_the_list_is_empty(kedge: Kedge, script: Script) -> None:
    """A script that reads the list always gets one; the reason is on stderr."""
    done = kedge("sites", "--json", script("print('hello')"))

    assert (done.stdout, done.returncode) == ("[]\n", 1)
    assert done.stderr.splitlines() == [
        "hello",
        "[kedge] there is nothing to list: the program called no module",
    ]


def test_a_program_that_fails_ends_as_it_does(kedge: Kedge, script: Script) -> None:
    """An error of the program is shown, with what was seen before it, and decides the exit status."""
    done = kedge(
        "sites",
        script("import torch\ntorch.nn.Tanh()(torch.ones(1))\nraise ValueError('no data')\n"),
    )

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: no data"
    assert done.stdout.startswith("Tanh (0 parameters")


def test_a_program_without_a_model_is_an_error_that_says_so(kedge: Kedge, script: Script) -> None:
    """Where there is nothing to list, that is said, with exit status 1."""
    done = kedge("sites", script("print('hello')"), fresh=True)

    assert (done.stdout, done.returncode) == ("", 1)
    assert done.stderr == (
        "hello\n[kedge] there is nothing to list: the program called no module; with --ops, its operations are listed\n"
    )


def test_a_program_that_fails_before_its_model_is_not_one_without(
    kedge: Kedge, script: Script
) -> None:
    """An option behind the script is the script's, which may end at it."""
    done = kedge("sites", script("import sys\nfloat(sys.argv[1])\n"), "--json", fresh=True)

    assert "could not convert string to float: '--json'" in done.stderr
    assert "the program failed before it called a module" in done.stderr

    as_json = kedge("sites", "--json", script("float('no number')\n"), fresh=True)
    assert as_json.stdout == "[]\n"
    assert "the program failed before it called a module" in as_json.stderr


OPS = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)
        def forward(self, x):
            y = torch.relu(self.fc(x * 2))
            return y + torch.relu(-y)

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(10**9):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""


def test_operations_are_listed_if_asked_for(kedge: Kedge, script: Script) -> None:
    """``--ops`` adds the operations of the first forward, with the lines that make them."""
    done = kedge("sites", "--ops", script(OPS))

    assert (done.stderr, done.returncode) == ("", 0)
    table = done.stdout.partition("operation ")[2].splitlines()[1:]
    assert [line.split()[0] for line in table] == [
        "/mul",
        "fc/linear",
        "/relu#0",
        "/neg",
        "/relu#1",
        "/add",
    ]
    assert table[0].endswith("y = torch.relu(self.fc(x * 2))")
    assert "[1, 2] [1, 2] [1]  [1, 1]" in table[1]


TENSORS = """
    import torch

    w = torch.ones(2, 3, requires_grad=True)
    {optimizer}
    for _ in range(10**9):
        loss = torch.relu(torch.ones(4, 2) @ w).sum()
        loss.backward()
        {step}
"""


def test_operations_of_a_program_of_tensors_are_listed_with_their_statistics(
    kedge: Kedge, script: Script
) -> None:
    """The program is stopped after its first backward."""
    done = kedge("sites", "--ops", script(TENSORS.format(optimizer="", step="w.grad = None")))

    assert (done.stderr, done.returncode) == ("", 0)
    head, _, *table = done.stdout.splitlines()
    assert head == "operations outside of modules, with statistics of their results"
    assert [line.split()[:2] for line in table[1:]] == [
        ["ones#0", "1"],
        ["ones#1", "1"],
        ["matmul", "1"],
        ["relu", "1"],
        ["sum", "1"],
    ]
    assert table[-1].split("  ")[-1] == "loss = torch.relu(torch.ones(4, 2) @ w).sum()"
    assert " 24.0 " in table[-1]


def test_an_optimizer_ends_the_step_and_has_the_tensors_listed(
    kedge: Kedge, script: Script
) -> None:
    """Its tensors have the names of the program's variables."""
    made = TENSORS.format(
        optimizer="optimizer = torch.optim.SGD([w], lr=0.1)", step="optimizer.step()"
    )
    done = kedge("sites", "--ops", script(made))

    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.startswith(
        "tensors (6 parameters)\n\npath  type          sites\nw     Tensor[2, 3]  :grad :acc\n\noperations "
    )


def test_torch_is_imported_by_the_program_itself(kedge: Kedge, script: Script) -> None:
    """With ``--ops`` as without it."""
    source = (
        "import sys\nassert 'torch' not in sys.modules\nimport torch\nprint(torch.ones(2).exp())\n"
    )
    done = kedge("sites", "--ops", script(source), fresh=True)

    assert done.stderr == "tensor([2.7183, 2.7183])\n"
    assert [line.split()[:2] for line in done.stdout.splitlines()[3:]] == [
        ["ones", "1"],
        ["exp", "1"],
    ]


def test_what_each_module_takes_is_listed_if_asked_for(kedge: Kedge, script: Script) -> None:
    """With the inputs that the program gave; a model that is not alone has its own table."""
    done = kedge("sites", "--costs", script(TWO))

    assert (done.stderr, done.returncode) == ("training\n", 0)
    assert [line.split()[0] for line in done.stdout.splitlines() if line] == [
        "Net", "path", '""', "fc", "total:", "Tanh", "path", '""', "total:",
    ]  # fmt: skip
    documents = json.loads(kedge("sites", "--costs", "--json", script(TWO)).stdout)
    assert [row["multiply_adds"] for row in documents[0]["costs"]] == [2, 2]
    assert documents[0]["costs"][1]["outputs"] == [[1, 1]]


def test_costs_go_with_no_other_list(kedge: Kedge, script: Script) -> None:
    """The error says which option to leave out."""
    done = kedge("sites", "--costs", "--ops", script(TWO))

    assert done.returncode == 2
    assert "--costs is about all modules of a model: leave --ops out" in done.stderr
