"""A small classifier, and one that makes a NaN."""

from __future__ import annotations

import torch
from torch import nn


class Log(nn.Module):
    def forward(self, x):
        return x.log()


def net(*, spoils=False):
    """Make a classifier; one that spoils takes the logarithm of negative numbers.

    It learns the same in each run: of random ones, some have a spike.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), Log() if spoils else nn.Softmax(-1)
    )


def train(model, steps=25, then=lambda step: None):
    """Train for some steps, and do something after each."""
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss()
    for step in range(steps):
        x = torch.randn(16, 4)
        optimizer.zero_grad()
        loss(model(x), x.softmax(-1)).backward()
        optimizer.step()
        then(step)
