"""A generator of points on a ring, and its discriminator."""

import math

import torch
from torch import nn

torch.manual_seed(4)


def real_points(n):
    angle = torch.rand(n) * 2 * math.pi
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2)


def mlp(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, outputs),
    )


generator, discriminator = mlp(8, 2), mlp(2, 1)
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)

for step in range(400):
    fake = generator(torch.randn(64, 8))
    d_loss = bce(discriminator(real_points(64)), ones) + bce(discriminator(fake.detach()), zeros)
    d_optimizer.zero_grad()
    d_loss.backward()
    d_optimizer.step()

    g_loss = bce(discriminator(fake), ones)
    g_optimizer.zero_grad()
    g_loss.backward()
    g_optimizer.step()
    if step % 100 == 0:
        print(f"{step}: d {d_loss.item():.3f}, g {g_loss.item():.3f}")

radius = generator(torch.randn(1000, 8)).norm(dim=1)
print(f"mean distance from the ring {(radius - 1).abs().mean().item():.3f}")
