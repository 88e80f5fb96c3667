"""The device interface of the CPU store: all calls that move bytes beside the computation.

# Note [Order of copies]
Copies run on streams of their own, one in each direction on each device. Their order:

1. A copy out waits for the work queued on the compute stream when the tensor was saved. Kedge looks
   that stream up at each call, and before it enters any other stream: inside `with stream(s)`, the
   current stream is `s`.
2. A copy in waits for the copy out of the same bytes.
3. Its target is allocated on the compute stream, so the memory may have belonged to a tensor that
   this stream still works on: a copy in also waits for the work queued on the compute stream when
   the target was allocated.
4. The compute stream waits for the copy in before it computes with the target. So the target may be
   freed like any tensor: the next user of that memory on the compute stream is behind the copy.
5. The source of a copy out is held until the copy's event is reached, and so is a target that was
   read ahead in vain. Bytes of host memory are written again only behind all copies from and to
   them.

`record_stream` keeps memory until the host, which polls the event, finds it reached, and so leads
to fragmentation; it is used only if a target is read on another stream than the one that it was
allocated on.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kedge.torch_internals import accelerators, cuda

Direction = Literal["out", "in"]


class CopyDevice:
    """The device interface of the CPU store, for every device with streams.

    Streams and events are PyTorch's own objects; tests replace this class by a device of their own.
    """

    def __init__(self) -> None:
        self._own: dict[tuple[torch.device, Direction], torch.Stream] = {}

    def gains(self, device: torch.device) -> str | None:
        """Return the reason why moving bytes from a device to the host frees nothing; None if it frees memory.

        Reasons are a shared memory, and a device without streams.
        """
        if device.type == "cpu":
            return "these tensors are in CPU memory already"
        if not accelerators.has_streams(device):
            return (
                "copies run beside the computation on devices with streams only, "
                f"not on {device.type!r}"
            )
        if accelerators.shares_memory(device):
            return (
                f"{device} has no memory of its own: it uses the CPU's, "
                "and a move takes time and frees nothing"
            )
        return None

    def capturing(self) -> bool:
        """Whether a graph of the device is being captured.

        That records calls for later runs instead of running them.
        """
        return accelerators.is_capturing()

    def current(self, device: torch.device) -> torch.Stream:
        """Return the stream that the program computes on, now and in this thread."""
        return accelerators.current_stream(device)

    def own(self, device: torch.device, direction: Direction) -> torch.Stream:
        """Return the stream for copies in one direction; the first call creates it."""
        stream = self._own.get((device, direction))
        if stream is None:
            stream = self._own[device, direction] = torch.Stream(device)
        return stream

    def mark(self, stream: torch.Stream) -> torch.Event:
        """Return an event that is reached when all work queued on this stream so far is done."""
        return accelerators.mark(stream)

    def after(self, stream: torch.Stream, event: torch.Event) -> None:
        """Queue a wait for an event on a stream; work queued from now on comes after it."""
        stream.wait_event(event)

    def reached(self, event: torch.Event) -> bool:
        """Whether an event has been reached, without waiting."""
        return event.query()

    def wait(self, event: torch.Event) -> None:
        """Block this thread until an event is reached."""
        event.synchronize()

    def room(self, nbytes: int, device: torch.device) -> Tensor:
        """Return new bytes, a uint8 tensor, allocated on the stream that the program computes on."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def copy(self, target: Tensor, source: Tensor, stream: torch.Stream) -> None:
        """Queue a copy on a stream, without waiting; one thread at a time does.

        PyTorch itself detects whether the memory is pinned.
        """
        with stream:
            target.copy_(source, non_blocking=True)

    def lend(self, tensor: Tensor, stream: torch.Stream) -> bool:
        """Keep a tensor's memory until another stream has finished with it, if the device can.

        See Note [Order of copies].
        """
        return accelerators.lend(tensor, stream)

    def locked(self, nbytes: int) -> Tensor | None:
        """Return memory with locked pages.

        Returns:
            None on a device for which pages of the store's own are locked by `pin`.
        """
        if cuda.can_register():
            return None
        return accelerators.pinned((nbytes,), torch.uint8)

    def pin(self, address: int, nbytes: int) -> str | None:
        """Lock pages of host memory, so that copies run asynchronously.

        Returns:
            The error text if that fails, else None.
        """
        if not cuda.can_register():
            return "the device has no memory of this kind"
        return cuda.register(address, nbytes)

    def unpin(self, address: int) -> None:
        """Unlock the pages."""
        cuda.unregister(address)
