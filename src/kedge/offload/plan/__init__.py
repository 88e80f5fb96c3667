"""The planner: it learns, under a limit of memory or of time, which tensors to keep, rebuild, move and compress."""

from kedge.offload.plan.learn import Learner
from kedge.offload.plan.limits import planner_for
from kedge.offload.plan.plan import OffloadPlan
from kedge.offload.plan.solve import solve
from kedge.offload.plan.tables import Candidate, Limit, Link, StepTable, TensorKey

__all__ = [
    "Candidate",
    "Learner",
    "Limit",
    "Link",
    "OffloadPlan",
    "StepTable",
    "TensorKey",
    "planner_for",
    "solve",
]
