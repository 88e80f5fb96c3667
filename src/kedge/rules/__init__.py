"""Judgement: rules take a recording and return findings. Nothing here imports torch.

Each code has a file of its name: rules about values in `activations`, about gradients in
`gradients`, about parameters and optimizers in `parameters`, about losses and modes in `training`,
and NAN-BORN in `nonfinite`. They read recordings by means of `recorded`.
"""

from kedge.errors import NoSuchRule
from kedge.rules.evidence import Evidence
from kedge.rules.registry import ALL, check, explain
from kedge.rules.rule import Finding, Rule, Severity

__all__ = [
    "ALL",
    "Evidence",
    "Finding",
    "NoSuchRule",
    "Rule",
    "Severity",
    "check",
    "explain",
]
