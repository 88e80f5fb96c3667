"""Judgement: rules take a recording and give findings. Nothing here imports torch."""

from kedge.errors import NoSuchRule
from kedge.rules.registry import ALL, check, explain
from kedge.rules.rule import Finding, Rule, Severity

__all__ = ["ALL", "Finding", "NoSuchRule", "Rule", "Severity", "check", "explain"]
