"""Train on the digits 0 to 4, then tune the network for the digits 5 to 9."""

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(8)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3, padding=1)
        self.bn = nn.BatchNorm2d(12)
        self.relu = nn.ReLU()
        self.linear = nn.Linear(12 * 16, 48)

    def forward(self, x):
        x = nn.functional.avg_pool2d(self.relu(self.bn(self.conv(x))), 2)
        return self.relu(self.linear(x.flatten(1)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(48, 5)

    def forward(self, x):
        return self.head(self.backbone(x))


def fit(model, optimizer, images, labels, epochs):
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(32):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
    return loss.item()


digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
low, high = labels < 5, labels >= 5

model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
print("first task", fit(model, optimizer, images[low], labels[low], 4))

model.head = nn.Linear(48, 5)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
print("second task", fit(model, optimizer, images[high][:600], labels[high][:600] - 5, 8))

model.eval()
with torch.no_grad():
    right = model(images[high][600:]).argmax(1) == labels[high][600:] - 5
print(f"accuracy {right.float().mean().item():.3f}")
