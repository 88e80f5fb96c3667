"""A deep narrow network on handwritten digits, with He initialisation."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
DEPTH, WIDTH = 10, 64


def init_weights(module):
    if isinstance(module, nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.zeros_(module.bias)


layers = []
for _ in range(DEPTH):
    layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
model.apply(init_weights)

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32)
x = (x - x.mean()) / x.std()
dataset = TensorDataset(x, torch.tensor(digits.target))
loader = DataLoader(dataset, batch_size=64, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
criterion = nn.CrossEntropyLoss()

for epoch in range(15):
    running = 0.0
    for data, target in loader:
        optimizer.zero_grad()
        loss = criterion(model(data), target)
        loss.backward()
        optimizer.step()
        running += loss.item() * len(target)
    print(f"epoch {epoch + 1}: {running / len(dataset):.4f}")
