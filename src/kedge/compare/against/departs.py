"""The page of DEPARTS, the code of what held in a good run and does not hold in another one."""

from __future__ import annotations

import inspect
from typing import ClassVar

from kedge.rules.rule import Severity

CODE = "DEPARTS"
"""The code of the findings; the kind of their evidence names the relation."""


class Departs:
    """What held in a good run does not hold in another run of the same program.

    It is no rule: it needs two recordings, so kedge check looks for it only with --against GOOD.

    Meaning:
        The good run trained well, and something that held there is different here: a layer, a mode,
        an optimizer, a parameter that no longer moves, a size. It may be a mistake, or what you
        changed on purpose.

    Formula:
        Modules and sites of the two runs are matched as by kedge diff. Of each pair these are asked,
        in this order. The word in brackets is the kind in the evidence.

        Facts: the layers of the model, their parameters, and which are called (layers); the dtype of
        each site (dtype); the modules trained in training and in evaluation mode (modes); the
        operations that make inputs, outputs and the loss, and whether it is made small (operations,
        loss); the shares that dropouts keep (dropout); the sites that fire in each step (firing);
        the mode of evaluations (evaluation); whether gradients are new in each step (zero_grad); how
        often modules are called, and backward passes start, in a step (calls); whether inputs change
        from step to step, and have as many samples as each other (repeats, batch); the optimizers
        that step, what they hold, and their groups (optimizer, held, groups); their first learning rates,
        whether and how fast these change, and the highest one (rate, course); the parameters that
        move, and those that are frozen (still, moving); the parameters that are equal on all ranks,
        and the inputs that are not (ranks); the sites whose values are finite (finite).

        Sizes: root mean squares as powers of ten. At the beginning, the medians of the first
        measured steps are compared. Later, the median of the last quarter has to lie in the range
        that the good run had, with a margin (inputs, loss, activations, gradients, updates). A loss
        that fell in the good run has to fall here, after as many steps and samples (falls). Outputs
        in evaluation are compared with those of the training around, and this ratio has to lie in
        the good run's range (evaluation).

    Window:
        The measured steps of both runs, which may have other seeds, lengths and batch sizes. Steps
        after the good run's last one are not asked, nor is what the good run shows only after the
        last step here.

    Thresholds:
        They are part of the relations and cannot be set.

        Margins of sizes, in powers of ten, at first and later: inputs 0.2; loss 0.3; activations
        0.9 and 0.6; gradients 1.2 and 0.8; updates, relative to the weights, 1.2 and 0.8. Each is
        about one and a half times the largest distance between healthy repetitions that
        benchmarks/against.py has seen. Outputs in evaluation have that of activations, 0.9. Values
        below 1e-12 count as zero; those of a bias are not compared, because they may add up to
        nothing. The beginning is 5 measured steps.

        A loss counts as falling from 0.2 powers of ten on, and has to fall by 0.3 of what it fell
        in the good run. Another learning rate is one by a factor of 1.02: less is rounding. Another
        pace is a rate that stays for 4 times fewer steps, since a batch of twice the size has half
        as many steps in an epoch. An optimizer steps from the beginning if it first does within 10
        steps of the first one; those that come later, as of one training after another, are compared in
        their order as far as both runs have them.

        A parameter moves if it changes in 0.9 of the measured steps; others may wait for a batch
        that uses them. It has stopped after 10 measured steps without a change. A number of calls
        is usual if 0.9 of the steps have it. Inputs are the same in every step if 10 later measured
        steps have those of the first, as in SAME-BATCH. A site fires in each step if it does in 0.95. Fewer
        than 3 measured steps show nothing of each step. Runs are of the same program if 0.5 of the
        smaller model's modules are in both.

    Severity:
        - error: a fact of the program.
        - warning: a size, as this is inferred from the range of one good run. If there is a fact,
          of the sizes only those of the inputs are reported: the others may follow from it.

    Evidence:
        What was seen in the good run, what is seen here, the modules, parameters or sites that it
        concerns (paths), and whether it is inferred.

    Remedy:
        If you changed it on purpose, keep a recording of this run as the good one. Otherwise each
        finding says where to look.

    Cannot see:
        What the good run does wrong, too. Data of another meaning in values of the same size: labels
        that are shuffled, inputs that are not theirs. A mask that is left out, where it changes no
        operation that makes a value of a module. What is rarer than every measured step, or begins
        after the shorter run ends. Sizes that differ by less than the margins, and those of a good
        run that was unusual itself.
    """

    code: ClassVar[str] = CODE
    name: ClassVar[str] = "what held in a good run does not hold here"
    severity: ClassVar[Severity] = "error"


def page() -> str:
    """Return the page, as `kedge.rules.explain` does for a rule."""
    return f"{Departs.code} ({Departs.severity}): {Departs.name}\n\n{inspect.getdoc(Departs)}\n"
