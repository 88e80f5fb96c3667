"""Two tasks from one network: the digit, and how much ink it has."""

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(21)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(64, 96), nn.ELU(), nn.Linear(96, 48), nn.ELU())
        self.digit = nn.Linear(48, 10)
        self.ink = nn.Sequential(nn.Linear(48, 16), nn.ELU(), nn.Linear(16, 1))

    def forward(self, x):
        features = self.shared(x)
        return self.digit(features), self.ink(features).squeeze(-1)


digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
y = torch.tensor(digits.target)
ink = x.sum(1)
ink = (ink - ink.mean()) / ink.std()
x = x * (0.5 + torch.rand(len(x), 1))
model = TwoHeads()
optimizer = torch.optim.Adam(model.parameters(), lr=1.5e-3)
digit_loss, ink_loss = nn.CrossEntropyLoss(), nn.MSELoss()

for epoch in range(12):
    order = torch.randperm(1500)
    for batch in order.split(50):
        digit, amount = model(x[batch])
        a = digit_loss(digit, y[batch])
        b = ink_loss(amount, ink[batch])
        loss = a + b
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: digit {a.item():.3f}, ink {b.item():.3f}")
with torch.no_grad():
    error = (model(x[1500:])[1] - ink[1500:]).abs().mean().item()
print(f"ink error {error:.3f}")
