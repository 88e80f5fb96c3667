"""Learn distances between handwritten digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
y = torch.tensor(digits.target)
groups = [torch.nonzero(y == k).flatten() for k in range(10)]


def sample_pairs(n):
    same = torch.rand(n) < 0.5
    first = torch.randint(len(y), (n,))
    second = torch.randint(len(y), (n,))
    for i in torch.nonzero(same).flatten().tolist():
        group = groups[y[first[i]]]
        second[i] = group[torch.randint(len(group), (1,))]
    return x[first], x[second], (y[first] == y[second]).float()


def contrastive(a, b, same, margin=1.0):
    distance = torch.sqrt(((a - b) ** 2).sum(1) + 1e-8)
    return (same * distance**2 + (1 - same) * torch.relu(margin - distance) ** 2).mean()


net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(300):
    a, b, same = sample_pairs(64)
    loss = contrastive(net(a), net(b), same)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 0:
        print(f"{step}: {loss.item():.4f}")
print(f"final loss {loss.item():.4f}")
