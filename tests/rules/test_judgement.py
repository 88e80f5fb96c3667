"""The judgement: what the rules could not judge, what they lacked, and the whole command that would help."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from kedge.report.verdict import advice, verdict
from kedge.rules.command import again, closer_look, with_dump_on
from kedge.rules.judgement import judge, judgement_of
from kedge.rules.registry import ALL
from kedge.rules.rule import Finding, Lack, Rule
from kedge.store.events import CompiledEvent, DumpEvent, EndEvent, event_from
from kedge.store.recording import Recording
from tests.rules.goldens import LACKS, makers
from tests.rules.scenes import Course, chain, steady

MANIFEST = {
    "command": ["train.py", "--lr", "0.1"],
    "script": "train.py",
    "every": 10,
    "budget": 0.03,
    "sites": "**",
}


@dataclasses.dataclass(frozen=True)
class Lacking(Rule):
    """A rule that lacks the given evidence, and finds something if asked to."""

    code: str
    have: int = 0
    need: int = 20
    grows: bool = True
    finds: bool = False
    name: str = "lacks something"
    severity: str = "warning"

    def check(self, recording):
        """Return one finding, or none."""
        return [Finding(self.code, "warning", "fc:out", 0, "It is so.")] if self.finds else []

    def lacking(self, recording):
        """Say what is missing."""
        return (
            Lack(self.code, "measured steps", self.have, self.need, self.grows)
            if self.have < self.need
            else None
        )


def run(steps: int = 1000, measured: int = 2, **manifest: Any) -> Recording:
    """Make a recording of so many steps, of which a few were measured."""
    made = Course(range(measured))
    made.weight("fc", steady(0.1, 1e-3, 1e-4))
    recording = made.recording()
    return dataclasses.replace(
        recording, manifest={**MANIFEST, **manifest}, events=(EndEvent(steps=steps),)
    )


def test_a_run_that_every_rule_could_judge_has_a_tick():
    """And it says how many rules over how many steps."""
    judgement = judge(run(), [Lacking("A", 20), Lacking("B", 25)])

    assert (judgement.complete, judgement.unjudged, judgement.command) == (True, (), "")
    assert verdict(judgement) == "✓ no findings: 2 rules over 2 measured steps"
    assert list(advice(judgement)) == []


def test_rules_that_could_not_judge_are_named_with_what_they_lacked():
    """No tick then, and the whole command."""
    judgement = judge(run(), [Lacking("A", 20), Lacking("B", 2), Lacking("C", 0, 1)])

    assert [(lack.code, lack.have, lack.need) for lack in judgement.unjudged] == [
        ("B", 2, 20),
        ("C", 0, 1),
    ]
    assert verdict(judgement) == (
        "no findings; 2 rules could not judge: B (2 of 20 measured steps), C (no measured steps)"
    )
    assert list(advice(judgement)) == [
        "to get enough for all of them: kedge run --budget none --every 1 train.py --lr 0.1"
    ]


def test_no_findings_are_so_far_only_before_the_end():
    """What has ended has none; what still goes on may have some later."""
    going = dataclasses.replace(run(), events=())

    assert verdict(judge(going, [Lacking("B", 2)])).startswith(
        "no findings so far; 1 rule could not judge: B (2 of 20"
    )
    assert verdict(judge(run(), [Lacking("B", 2)])).startswith(
        "no findings; 1 rule could not judge: B (2 of 20"
    )


def test_a_rule_that_spoke_could_judge():
    """Whatever it would have liked to have besides."""
    judgement = judge(run(), [Lacking("A", 2, finds=True)])

    assert judgement.complete
    assert verdict(judgement) == "1 warning: 1 rule over 2 measured steps"


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (
            {"what": "children", "detail": {"steps": 4, "seconds": 12.34}},
            "12.3 s of computation in child processes",
        ),
        ({"what": "children", "detail": {}}, "computation in child processes"),
        ({"what": "hook-tables"}, "modules, because the program replaced PyTorch's global hooks"),
    ],
)
def test_what_took_place_unseen_is_said_in_place_of_a_tick(event, words):
    """A run whose training nobody watched has no findings, and that means nothing."""
    recording = run()
    recording = dataclasses.replace(
        recording, events=(*recording.events, event_from({"kind": "unseen", **event}))
    )
    judgement = judge(recording, [Lacking("A", 20)])

    assert not judgement.complete
    assert verdict(judgement) == f"no findings; not watched: {words}"


def test_a_short_line_counts_the_rest():
    """The last line of a run names a few."""
    judgement = judge(run(), [Lacking(code, 2) for code in "ABCDE"])

    assert verdict(judgement, 3).endswith(
        "B (2 of 20 measured steps), C (2 of 20 measured steps), 2 more"
    )


@pytest.mark.parametrize(
    ("steps", "need", "helped"), [(20, 20, True), (19, 20, False), (1000, 1001, False)]
)
def test_no_command_is_named_that_would_not_help(steps, need, helped):
    """A run that is too short for a rule stays so with every step measured."""
    judgement = judge(run(steps), [Lacking("A", 2, need)])

    assert bool(judgement.command) == helped
    assert list(advice(judgement)) == (
        ["to get enough for it: kedge run --budget none --every 1 train.py --lr 0.1"]
        if helped
        else ["the run is too short for it"]
    )


@pytest.mark.parametrize(
    ("severity", "step", "expected"),
    [
        ("error", 3, "to get enough for it, mend NAN-BORN first: nothing counts from step 3 on"),
        ("error", 15, "to get enough for it: kedge run --budget none --every 1 train.py --lr 0.1"),
        ("warning", 3, "to get enough for it: kedge run --budget none --every 1 train.py --lr 0.1"),
    ],
    ids=["early", "late", "recovered"],
)
def test_a_run_is_as_long_as_the_steps_before_a_nan(severity, step, expected):
    """Neither options nor a longer run help where a NaN left too few; a run that recovered from one goes on to count."""
    born = Finding("NAN-BORN", severity, "fc:out", step, "It was made there.")
    judgement = judgement_of(run(20), [born], [Lacking("A", 2, 10)])

    assert list(advice(judgement)) == [expected]


def test_what_a_step_has_is_taken_into_account():
    """Two measured steps with eight values each would be 800 in a hundred."""
    assert judge(run(100), [Lacking("A", 16, 800)]).command
    assert not judge(run(100), [Lacking("A", 16, 801)]).command


def test_some_are_helped_and_others_need_a_longer_run():
    """Each is named with what helps it; what nothing helps is only named."""
    judgement = judge(
        run(100), [Lacking("A", 2), Lacking("B", 2, 500), Lacking("C", 0, 1, grows=False)]
    )

    assert judgement.helped == ("A",)
    assert list(advice(judgement)) == [
        "to get enough for A: kedge run --budget none --every 1 train.py --lr 0.1",
        "the run is too short for B",
    ]


@pytest.mark.parametrize(
    ("manifest", "command"),
    [
        ({}, "kedge run --budget none --every 1 train.py --lr 0.1"),
        ({"every": 1}, "kedge run --budget none --every 1 train.py --lr 0.1"),
        ({"budget": None}, "kedge run --budget none --every 1 train.py --lr 0.1"),
        ({"budget": None, "every": 1}, ""),
        (
            {"sites": "h.*:out"},
            "kedge run --budget none --every 1 --sites 'h.*:out' train.py --lr 0.1",
        ),
        (
            {"command": ["-m", "pkg.train", "a b", "$x"]},
            "kedge run --budget none --every 1 -m pkg.train 'a b' '$x'",
        ),
        ({"command": ["my train.py"]}, "kedge run --budget none --every 1 'my train.py'"),
        (
            {"world": 4},
            "torchrun --nproc-per-node 4 -m kedge run --budget none --every 1 train.py --lr 0.1",
        ),
        ({"script": "python", "command": [""]}, "kedge.watch(every=1, budget=None)"),
        ({"script": "/x/ipykernel_launcher.py"}, "kedge.watch(every=1, budget=None)"),
    ],
)
def test_the_command_is_whole_and_names_nothing_that_was_in_use(manifest, command):
    """The script, its arguments and its quotes, as they were typed."""
    assert closer_look(run(**manifest)) == command


def test_a_dump_is_advised_where_every_step_was_measured_and_none_was_made():
    """And where it was, nothing is."""
    everything = {"budget": None, "every": 1}

    assert with_dump_on(run()) == "kedge run --dump train.py --lr 0.1"
    assert (
        with_dump_on(run(**everything))
        == "kedge run --budget none --every 1 --dump train.py --lr 0.1"
    )
    assert with_dump_on(run(dump=True)) == ""
    assert again(run(**everything), "To see") == (
        'To see, run it again with "kedge run --budget none --every 1 --dump train.py --lr 0.1". '
    )
    assert again(run(**everything, dump=True), "To see") == ""


def test_a_run_with_compiled_code_is_advised_to_dump_uncompiled():
    """Calls in compiled code cannot be kept: the command switches compiling off, also after a run whose dump kept none."""
    everything, compiled = {"budget": None, "every": 1}, CompiledEvent(step=0)

    def of(*events, sites=("out",), **manifest):
        found = run(**manifest)
        return dataclasses.replace(
            found, events=events, sites=tuple(SimpleNamespace(kind=kind) for kind in sites)
        )

    assert closer_look(of(compiled)) == "kedge run --budget none --every 1 train.py --lr 0.1"
    assert (
        with_dump_on(of(compiled)) == "TORCH_COMPILE_DISABLE=1 kedge run --dump train.py --lr 0.1"
    )
    assert (
        with_dump_on(of(compiled, dump=True))
        == "TORCH_COMPILE_DISABLE=1 kedge run --dump train.py --lr 0.1"
    )
    assert (
        with_dump_on(of(compiled, DumpEvent(step=0, site="a:out", folder="dump-0"), dump=True))
        == ""
    )
    assert 'after torch.compiler.set_stance("force_eager")' in with_dump_on(
        of(compiled, script="python")
    )
    assert "--every 1 train.py" in again(of(compiled), "To see")
    assert "TORCH_COMPILE_DISABLE=1 kedge run --budget none" in again(
        of(compiled, **everything), "To see"
    )
    assert '"TORCH_COMPILE_DISABLE=1 kedge run --dump train.py' in again(
        of(compiled, sites=["param.grad"]), "To see"
    )


def test_a_run_still_going_lacks_its_end():
    """What is written when the program ends cannot be judged before."""
    scene = chain()
    scene.step(0)

    codes = {lack.code: lack for lack in judge(scene.recording()).unjudged}

    assert not codes["NEVER-CALLED"].grows
    assert not codes["UNUSED-PARAM"].grows


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.code)
def test_a_rule_lacks_what_is_more_than_there_is(rule):
    """In a run of one measured step, and in none."""
    scene = chain(loss=True)
    scene.step(0)
    for recording in (
        scene.recording(),
        Recording.build(),
        Recording.build(["fc:out", "fc.weight:param.grad"]),
    ):
        lack = rule.lacking(recording)
        assert lack is None or (lack.code == rule.code and 0 <= lack.have < lack.need)


def test_what_each_rule_lacks_in_a_run_of_one_step():
    """All that need more than one measured step, and what is written at the end: as their tests say."""
    scene = chain(loss=True)
    scene.step(0)

    unjudged = judge(scene.recording()).unjudged

    makers()
    assert {lack.code: (lack.have, lack.need) for lack in unjudged} == LACKS, (
        "say it in the rule's test: @golden(code, lacks=(have, need))"
    )


def test_a_long_healthy_run_is_judged_in_full():
    """Sixty measured steps, the events of the training and its end leave nothing open."""
    made = Course(range(60))
    for i in range(6):
        made.weight(f"l{i}", steady(0.1, 1e-3, 1e-4), out=1.0)
    made.rows = [
        row | ({"exponents": [0] * 40 + [9] + [0] * 42} if "grad" in row["site"] else {})
        for row in made.rows
    ]
    made.rows = [
        row | ({"min": -0.3, "max": 0.3} if row["site"].endswith(":param") else {})
        for row in made.rows
    ]
    made.loss([2.0 / (1 + i / 4) + 0.01 * (i % 3) for i in range(60)])
    made.roots[0]["trained"] = True
    made.events = [
        {
            "kind": "optimizers",
            "optimizers": [{"index": 0, "type": "Adam", "roots": [0], "rates": [0.001]}],
        },
        {"kind": "modes", "step": 0, "root": 0, "training": True, "eval": [], "train": []},
        {"kind": "loss-graph", "step": 0, "site": "loss", "nodes": ["MeanBackward0"]},
        {"kind": "end", "steps": 60},
    ]

    judgement = judge(made.recording())

    assert judgement.unjudged == ()
    judged = len(ALL) - len(judgement.idle)
    told, _, reasons = verdict(judgement).partition("; ")
    assert told == f"✓ no findings: {judged} rules over 60 measured steps"
    assert reasons.startswith(f"{len(judgement.idle)} had nothing to judge: ")
    assert "one process (RANK-DEPARTS)" in reasons
