"""A training whose loss, computed in the loop, becomes NaN after most of its steps: a variance that falls to zero.

python nan_in_the_loop.py DEVICE STEPS VARIANCE
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn


class Head(nn.Module):
    def __init__(self, variance: float) -> None:
        super().__init__()
        self.mean, self.variance = nn.Linear(16, 1), nn.Linear(16, 1)
        nn.init.constant_(self.variance.bias, variance)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(hidden), torch.relu(self.variance(hidden))


def main(device: str, steps: int, variance: float) -> None:
    """Train, and print the last loss."""
    torch.manual_seed(0)
    body = [nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()]
    net = nn.Sequential(*body, Head(variance)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.002)
    loss = torch.zeros(())
    for _ in range(steps):
        x = torch.randn(32, 4, device=device)
        y = x.sum(1, keepdim=True) * 0.01
        mean, spread = net(x)
        loss = (torch.log(spread) + (y - mean) ** 2 / spread).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(loss.item())


main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
