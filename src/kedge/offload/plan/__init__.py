"""What to keep, rebuild, move and compress under a limit of memory or of time: learned, planned, and said."""

from kedge.offload.plan.learn import Learner
from kedge.offload.plan.limits import planner_for
from kedge.offload.plan.plan import Plan
from kedge.offload.plan.solve import solve
from kedge.offload.plan.tables import Candidate, Key, Limit, Link, Table

__all__ = ["Candidate", "Key", "Learner", "Limit", "Link", "Plan", "Table", "planner_for", "solve"]
