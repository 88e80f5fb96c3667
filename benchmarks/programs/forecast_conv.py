"""Forecast the next value of a series of sales with convolutions over time."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

rng = np.random.default_rng(0)
torch.manual_seed(0)
days = np.arange(1500)
sales = (
    20000
    + 4000 * np.sin(days / 7 * 2 * np.pi)
    + 2500 * np.sin(days / 91 * 2 * np.pi)
    + 600 * rng.standard_normal(1500)
)
mean, scale = sales[:1200].mean(), sales[:1200].std()
series = (sales - mean) / scale

window = 28
x = torch.tensor(
    np.stack([series[i : i + window] for i in range(1500 - window)]), dtype=torch.float32
).unsqueeze(1)
y = torch.tensor(series[window:], dtype=torch.float32).unsqueeze(1)
loader = DataLoader(TensorDataset(x[:1172], y[:1172]), batch_size=32, shuffle=True)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(1, 16, 3, padding=2, dilation=2)
        self.conv2 = nn.Conv1d(16, 16, 3, padding=4, dilation=4)
        self.act = nn.ReLU()
        self.out = nn.Linear(16 * window, 1)

    def forward(self, x):
        x = self.act(self.conv1(x))
        x = self.act(self.conv2(x))
        return self.out(x.flatten(1))


model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.SmoothL1Loss()
for epoch in range(8):
    losses = []
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"epoch {epoch}: {np.mean(losses):.4f}")
with torch.no_grad():
    error = (model(x[1172:]) - y[1172:]).abs().mean().item() * scale
print(f"mean error {error:.0f}")
