"""Solve y'' = -y with a network: physics-informed training."""

import math

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)


def derivative(y, x):
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]


for step in range(500):
    t = (torch.rand(64, 1) * math.pi).requires_grad_()
    y = net(t)
    second = derivative(derivative(y, t), t)
    start = torch.zeros(1, 1, requires_grad=True)
    at_start = net(start)
    slope = derivative(at_start, start)
    loss = (second + y).square().mean() + at_start.square().mean() + (slope - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"{step}: {loss.item():.5f}")
grid = torch.linspace(0, math.pi, 50).unsqueeze(1)
print(f"error {(net(grid) - grid.sin()).abs().mean().item():.4f}")
