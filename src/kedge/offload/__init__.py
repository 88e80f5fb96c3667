"""Offloading: saved tensors kept by reference, rebuilt, moved or compressed, and the account of them.

`kedge.offload` is both this package and the function that offloads; Python binds a package to its
name in the parent as soon as anything in it is imported, so the package itself can be called.
"""

from kedge.calls.called_package import make_callable

make_callable("kedge.offload", "kedge.offload.offload")
