"""The operation that makes the difference: a finding for those who show one."""

from kedge.compare.operations.finding import ArgumentDifference, OperationFinding
from kedge.compare.operations.seen import SeenOperation

GELU = OperationFinding(
    "operation",
    "gelu at model.py:41 gets other arguments: approximate is not given in A, 'tanh' in B",
    "it gets equal inputs in both, and its result is not equal",
    (SeenOperation("operation", "gelu", "block", "model.py", 41, "h = F.gelu(h)"),),
    (
        SeenOperation(
            "operation", "gelu", "block", "model.py", 41, "h = F.gelu(h, approximate='tanh')"
        ),
    ),
    (ArgumentDifference("approximate", None, "'tanh'"),),
    ("net.pt",),
)
