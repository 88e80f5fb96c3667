"""Predict a mean and a spread: regression with noise that depends on the input."""

import math

import torch
from torch import nn


class Gaussian(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.mean = nn.Linear(48, 1)
        self.spread = nn.Linear(48, 1)

    def forward(self, x):
        h = self.body(x)
        return self.mean(h), nn.functional.softplus(self.spread(h)) + 1e-3


def nll(mean, std, y):
    return (torch.log(std) + (y - mean) ** 2 / (2 * std**2) + 0.5 * math.log(2 * math.pi)).mean()


if __name__ == "__main__":
    torch.manual_seed(9)
    x = torch.rand(1600, 1) * 6 - 3
    y = torch.sin(2 * x) + (0.05 + 0.3 * x.abs()) * torch.randn_like(x)
    model = Gaussian()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(20):
        for batch in torch.randperm(1600).split(80):
            mean, std = model(x[batch])
            loss = nll(mean, std, y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 5 == 0:
            print(f"epoch {epoch}: {loss.item():.3f}")
    with torch.no_grad():
        print(f"final loss {nll(*model(x), y).item():.3f}")
