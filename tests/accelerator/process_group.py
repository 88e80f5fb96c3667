"""A process group for tensors of the simulated device: gloo on the host, with copies there and back."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "sim_gloo"


class Staged(dist.ProcessGroup):
    """Calls gloo with copies on the host, and waits: what a collective returns is done.

    What one rank sends another is not.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802 - as PyTorch calls it
        """Return the name that it is registered by."""
        return NAME

    @property
    def group_name(self) -> str:
        """The name under which PyTorch keeps it: one in Python has no backend to ask."""
        return dist.distributed_c10d._world.pg_names[self]

    def _call(self, name: str, out: Any, *given: Any) -> dist.Work:
        """Call gloo with outputs and inputs on the host, and copy the outputs back."""
        there = _on_host(out)
        work = _Copied(getattr(self._gloo, name)(there, *map(_on_host, given)), out, there)
        work.wait()
        return work

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """See PyTorch."""
        return self._call("allreduce", tensors, *_some(opts))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """See PyTorch."""
        return self._call("broadcast", tensors, *_some(opts))

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """See PyTorch."""
        return self._call("allgather", outputs, inputs, *_some(opts))

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        return self._call("_allgather_base", output, given, *_some(opts))

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        return self._call("_reduce_scatter_base", output, given, *_some(opts))

    all_gather_single, reduce_scatter_single = (
        _allgather_base,
        _reduce_scatter_base,
    )  # the names since PyTorch 2.13

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """See PyTorch."""
        return [self._allgather_base(*each) for each in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        """See PyTorch."""
        one = dist.ReduceScatterOptions()
        one.reduceOp = opts.reduceOp
        return [
            self._reduce_scatter_base(*each, one) for each in zip(outputs, inputs, strict=True)
        ][-1]

    def alltoall_base(
        self,
        output: Tensor,
        given: Tensor,
        out_sizes: list[int],
        in_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        """See PyTorch."""
        return self._call("alltoall_base", output, given, out_sizes, in_sizes, *_some(opts))

    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        """See PyTorch."""
        return self._call("scatter", outputs, inputs, *_some(opts))

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> dist.Work:
        """See PyTorch."""
        # Its sender waits for the receiver, who may be sending to it.
        return _Copied(self._gloo.send(_on_host(tensors), to, tag), [], [])

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        """See PyTorch."""
        there = _on_host(tensors)
        return _Copied(self._gloo.recv(there, source, tag), tensors, there)

    def barrier(self, opts: Any = None) -> dist.Work:
        """See PyTorch."""
        work = _Copied(self._gloo.barrier(), [], [])
        work.wait()
        return work


class _Copied(dist.Work):
    """Work of gloo on copies on the host, whose outputs are copied back by the first who waits."""

    def __init__(self, work: dist.Work, out: Any, there: Any) -> None:
        super().__init__()
        self._work, self._out, self._there = work, out, there
        self._waited = False

    def wait(self, timeout: Any = None) -> bool:
        """Wait for gloo, and copy."""
        if not self._waited:
            self._work.wait()
            _copy(self._out, self._there)
            self._waited = True
        return True

    def is_completed(self) -> bool:
        """Return whether the outputs are there."""
        return self._waited

    def get_future(self) -> Any:
        """Return a future that has come, with the outputs."""
        self.wait()
        future: Any = torch.futures.Future(devices=sorted(_devices(self._out), key=str))
        future.set_result(self._out)
        return future


def register() -> None:
    """Register it for `init_process_group(NAME)`, for tensors of the host and of the device."""
    dist.Backend.register_backend(NAME, Staged, devices=["cpu", "sim"])


def _some(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)


def _devices(value: Any) -> set[torch.device]:
    """Return the devices besides the CPU that tensors are on."""
    if isinstance(value, list):
        return set().union(*map(_devices, value))
    return {value.device} - {torch.device("cpu")}


def _on_host(value: Any) -> Any:
    if isinstance(value, list):
        return [_on_host(each) for each in value]
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _copy(value: Any, host: Any) -> None:
    if isinstance(value, list):
        for each, there in zip(value, host, strict=True):
            _copy(each, there)
    elif value.device.type != "cpu":
        value.detach().copy_(host)
