"""Fit a curve with L-BFGS."""

import torch
from torch import nn

torch.manual_seed(3)
x = torch.linspace(-3, 3, 200).unsqueeze(1)
y = torch.sin(2 * x) * torch.exp(-0.2 * x**2) + 0.02 * torch.randn_like(x)
model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=10, history_size=20)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


for step in range(30):
    loss = optimizer.step(closure)
print(f"final loss {loss.item():.5f}")
