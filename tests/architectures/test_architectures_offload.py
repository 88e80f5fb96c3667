"""On real architectures: offloading without a codec changes no bit of what training gives."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("transformers")
from training import train, unlike
from zoo import ZOO, Architecture

import kedge

MODES = {
    "rebuild": kedge.Rebuild(),
    "disk": kedge.Disk(),
    "disk alone": kedge.Disk(rebuild=False),
    "uncached": kedge.Disk(uncached=True, checksum=True),
}
pytestmark = pytest.mark.filterwarnings("ignore::kedge.errors.NothingGained")
architectures = pytest.mark.parametrize("architecture", ZOO, ids=lambda a: a.name)


@pytest.mark.parametrize("mode", MODES)
@architectures
def test_offloading_changes_no_bit_of_a_training(architecture: Architecture, mode: str) -> None:
    """Outputs, loss, gradients, generators and weights of two steps are those of a model that keeps all in memory."""
    plain = train(architecture, architecture.build())
    model = architecture.build()
    with kedge.offload(model, to=MODES[mode], min_bytes=256) as account:
        offloaded = train(architecture, model)

    assert unlike(plain, offloaded) == []
    gc.collect()  # outputs of transformers are in cycles
    total = account.total
    assert total.moved or total.rebuilt, str(account)
    assert total.freed.number == total.sum("moved").number + total.sum("rebuilt").number
