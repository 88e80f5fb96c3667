"""A LeNet on handwritten digits that come as bytes, from 0 to 255."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(3)


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(16 * 2 * 2, 48),
            nn.ReLU(),
            nn.Linear(48, 10),
        )

    def forward(self, x):
        x = self.features(x)
        return self.classifier(x.view(x.size(0), -1))


def load():
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    pixels = (digits.images * 255 / 16).astype(np.uint8)[order]
    images = torch.from_numpy(pixels).unsqueeze(1).float() / 255
    labels = torch.from_numpy(digits.target[order])
    return images[:1440], labels[:1440], images[1440:], labels[1440:]


x_train, y_train, x_test, y_test = load()
model = LeNet()
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
batch_size = 32

for epoch in range(12):
    permutation = torch.randperm(len(x_train))
    for i in range(0, len(x_train), batch_size):
        indices = permutation[i : i + batch_size]
        logits = model(x_train[indices])
        loss = loss_fn(logits, y_train[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).float().mean()
    print(f"epoch {epoch} loss {loss.item():.3f} accuracy {accuracy:.3f}")
