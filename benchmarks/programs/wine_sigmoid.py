"""Classify wines with sigmoid units."""

import torch
from sklearn.datasets import load_wine
from sklearn.preprocessing import StandardScaler
from torch import nn

torch.manual_seed(5)
wine = load_wine()
features = StandardScaler().fit_transform(wine.data)
x = torch.tensor(features, dtype=torch.float)
y = torch.tensor(wine.target)
permutation = torch.randperm(len(y))
x, y = x[permutation], y[permutation]


class WineNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(13, 24)
        self.layer2 = nn.Linear(24, 24)
        self.act1 = nn.Sigmoid()
        self.act2 = nn.Sigmoid()
        self.layer3 = nn.Linear(24, 3)

    def forward(self, x):
        x = self.act1(self.layer1(x))
        x = self.act2(self.layer2(x))
        return self.layer3(x)


net = WineNet()
optimizer = torch.optim.RMSprop(net.parameters(), lr=0.005)
loss_function = nn.CrossEntropyLoss()
for epoch in range(60):
    net.train()
    for i in range(0, 140, 20):
        optimizer.zero_grad()
        loss = loss_function(net(x[i : i + 20]), y[i : i + 20])
        loss.backward()
        optimizer.step()
net.eval()
print("accuracy", (net(x[140:]).argmax(1) == y[140:]).float().mean().item())
