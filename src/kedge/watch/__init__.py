"""Watches a program: the models that it trains, the steps that are measured, and the recording.

`kedge.watch` is both this package and the function that watches a block; as with `kedge.offload`,
the package can be called.
"""

from kedge.calls.called_package import make_callable

make_callable("kedge.watch", "kedge.watch.run.block")
