"""Accumulate the gradients of four small batches for each step."""

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
MICRO_BATCH, ACCUMULATE = 16, 4
digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
y = torch.tensor(digits.target)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU(),
    nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.GroupNorm(4, 32), nn.GELU(),
    nn.Flatten(), nn.Linear(32 * 16, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

for epoch in range(6):
    for number, batch in enumerate(torch.randperm(1472).split(MICRO_BATCH)):
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch]) / ACCUMULATE
        loss.backward()
        if (number + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    print(f"epoch {epoch}: {loss.item() * ACCUMULATE:.4f}")
with torch.no_grad():
    print(f"accuracy {(model(x[1472:]).argmax(1) == y[1472:]).float().mean().item():.3f}")
