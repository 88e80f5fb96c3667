"""The sentences and the remedies for births."""

from __future__ import annotations

from kedge.rules.nonfinite.wording.advice import DOMAIN

_FIRST = "{site} was the first to contain {value}, at step {step}; "
_GRADIENT = "{site} was the first gradient to contain {value}, at step {step}; "
BETWEEN = ("between", "entry")
CALLED = {
    False: "{name} is called at {file}:{line}, in {function}",
    True: "The result goes in at {file}:{line}, in {function}",
}
BACKWARD_CALLED = "backward() is called on it at {file}:{line}{inside}"

MESSAGES = {
    "module": _FIRST + "its {parts}.",
    "own": _FIRST
    + "the modules inside it returned finite values, so an operation in its own forward made it{operation}.",
    "between": "{site} was the first to contain {value}, at step {step}, although {near} before it was finite: "
    "an operation in the forward of {name} made it, outside any watched module{operation}.",
    "entry": "{site} was the first to contain {value}, at step {step}: it came from outside the model, "
    "with the batch or from a computation of the program before this call{operation}.",
    "unclear": _FIRST
    + "its input contained it too, or was not watched, so the call or operation that made it is not known.",
    "parameter": "{site} contained {value} already when the forward of step {step} used it, and nothing was recorded "
    "before: it came from the initialisation or a checkpoint, or from a step without records.",
    "stepped": "{site} contained {value} when the forward of step {step} used it, and all was finite in step {before}: "
    "the optimizer's step between the two made it.",
    "unseen": "{site} contained {value} when the forward of step {step} used it, and all was finite in step {before}: "
    "it was made between the two, in steps that were not recorded.",
    "update": "{site} was the first to contain {value}, at step {step}; "
    "the parameter and its gradient were finite, so the optimizer's step made it.",
    "within": "{site} was the first to contain {value}, at step {step}, although its input and its parameters were finite "
    "where they "
    "were recorded, and too small to overflow. So its parameters changed between two calls in that step, for example "
    "by an optimizer's step with non-finite gradients, such as {near}.",
    "written": "{site} contained {value} when the optimizer got the gradients of step {step}, although all "
    "of them were finite after backward: they were changed in between, by accumulation, unscaling, clipping or the program "
    "itself.",
    "backward": _GRADIENT
    + "the gradient that arrived at {name} was finite, so its backward made it.",
    "either": _GRADIENT
    + "the gradient that arrived at {name} was finite: its backward made it, or {others}.",
    "beside": _GRADIENT
    + "the gradient that arrived at {takers} was finite, and too small to overflow there: "
    "the backward of an operation in {name}'s own forward made it, or of one on its output, which takes the same value.",
    "gap": _GRADIENT
    + "{near}, nearer to the loss, was finite: a backward between the two made it.",
    "made": "{site} contained {value} at step {step}, while the modules' outputs were finite: the program's own operations "
    "after them made it{operation}.",
    "loss": _GRADIENT
    + "there the gradient enters the model: an operation of the program after it, in the loss or before it, made it.",
}
GAP_AT_THE_LOSS = (
    "{site} contained {value} at step {step}, and so did every gradient nearer to the loss, while the outputs were finite: "
    "the loss or a backward made it, and clipping by norm spreads it to all gradients."
)
GAP_OF_A_FINITE_LOSS = (
    _GRADIENT
    + "the loss was finite, and so was {near}, nearer to it: it arose between the two, in a backward there{between}, or from "
    "a value of the forward that a mask hides from the loss."
)
ALL_OF_A_FINITE_LOSS = (
    "{site} contained {value} at step {step}, and so did every gradient nearer to the loss, while the loss was finite: "
    "it arose in the loss or between it and this parameter, in a backward there{between}, or from a value of the forward that "
    "a mask hides from the loss."
)
OR_WRITTEN = ", or the program changed it before the optimizer got it."
MADE_UNSEEN = (
    "{site} contained {value} at step {step}, without records of the modules' outputs: a module or the program's own "
    "operations after them made it{operation}."
)
OWN_OR_UNSEEN = _FIRST + (
    "all modules inside it that were recorded returned finite values, so an operation in its own forward made "
    "it{operation}, or {unseen} inside it did, which was not recorded."
)
BETWEEN_AT_THE_START = (
    "{site} was the first to contain {value}, at step {step}: "
    "an operation in the forward of {name} made it, outside any watched module{operation}."
)

GROWN = (
    "The optimizer's steps are too large: the rms of {site} had gone from {was:.2g} at step {first} to {words} at step "
    "{step}. Lower the learning rate or warm it up, clip gradients, and look at the steps before."
)
UPDATED = (
    "Lower the learning rate: the step overflowed{figures}. If the rate is small, raise the optimizer's "
    "eps, and check its state if it came from a checkpoint."
)
DIVERGED = (
    "The values next to it had grown to {largest:.1e}: the run had diverged before, and this is where it overflowed "
    "the dtype. Lower the learning rate or warm it up, clip gradients, and look at the steps before."
)
LARGE_FROM_THE_START = (
    "The values next to it were {largest:.1e} in the first step already, before any training: look at the inputs and at the "
    "initialisation."
)
SCALED = (
    "Once in a while this is normal: the loss scale is too large for float16, and the scaler skips the "
    "step and halves the scale. If it goes on: "
)
REMEDIES = {
    "entry": "Check the batch before the model sees it: torch.isfinite(x).all(); missing values, a division by a zero "
    "standard deviation and a bad file are the usual causes.",
    "unclear": "{again}In {name}, " + DOMAIN + ".",
    "parameter": "Check the checkpoint and the initialisation with torch.isfinite{before}.",
    "stepped": "Lower the learning rate or warm it up, clip gradients, and check the optimizer's state if it came from a "
    "checkpoint.",
    "unseen": "{again}If no module is named then, the loss or an optimizer's step made it.{dumped}",
    "written": "Look at what the program does between backward() and step(): clip_grad_norm_ with an infinite norm turns "
    "every gradient into NaN (error_if_nonfinite=True reports it), accumulated gradients can overflow, and "
    "unscaling divides by a scale that may be zero.",
    "backward": "In {name}, look for an operation whose derivative is infinite where its value is not: sqrt at "
    "0, pow below 1 at 0, a division, or torch.where, which multiplies the branch that is not taken by zero: infinity "
    "times zero is NaN. Change its input, not its output (clamp or where before the operation).{uncompiled}",
    "either": "Look, there and in the forward around it, for an operation whose derivative is infinite: sqrt at "
    "0, pow below 1 at 0, a division, or torch.where around one of them. Change its input, not its output.{dumped}",
    "beside": "Look in the forward of {name} for an operation whose derivative is infinite, beside the modules that it "
    "calls: sqrt at 0, pow below 1 at 0, a division, or torch.where around one of them. Change its input, not "
    "its output.{dumped}",
    "gap": "Look at the operations between these sites for one whose derivative is infinite: sqrt at 0, "
    "a division, or torch.where around one of them. Change its input, not its output.{dumped}",
    "loss": "Look at the loss, and at what lies between it and the model: log of 0, division by a zero count (an empty mask), "
    "sqrt at 0, or a loss scale that is too large.{uncompiled}",
}
REMEDIES["within"] = REMEDIES["made"] = REMEDIES["loss"]
