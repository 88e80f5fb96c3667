"""Work in several threads, and replicas as `DataParallel` makes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn


def in_threads(*work: Callable[[], Any]) -> None:
    """Run functions at the same time, raising what one of them raises."""
    errors: list[BaseException] = []

    def run(job: Callable[[], Any]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(job,), name=f"worker-{i}") for i, job in enumerate(work)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def replicas_of(model: nn.Module, n: int) -> list[nn.Module]:
    """Replicas as `DataParallel` makes them, on one device: the same hooks, each its own modules."""
    replicas = []
    for _ in range(n):
        copies = {id(m): m._replicate_for_data_parallel() for m in model.modules()}
        for m in model.modules():
            twin = copies[id(m)]
            for name, child in m._modules.items():
                setattr(twin, name, copies[id(child)])
            for name, param in m._parameters.items():
                setattr(twin, name, param * 1)  # a replica's parameters are no leaves
        replicas.append(copies[id(model)])
    return replicas
