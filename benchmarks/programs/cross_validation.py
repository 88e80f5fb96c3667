"""Five-fold cross-validation of a network on the breast cancer table."""

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import KFold
from torch import nn


def build_model():
    return nn.Sequential(
        nn.Linear(30, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 2)
    )


def accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


torch.manual_seed(0)
data = load_breast_cancer()
x = torch.tensor(data.data, dtype=torch.float32)
x = (x - x.mean(0)) / x.std(0)
y = torch.tensor(data.target)
scores = []
for fold, (train, test) in enumerate(KFold(5, shuffle=True, random_state=0).split(x)):
    train, test = torch.tensor(train), torch.tensor(test)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(10):
        model.train()
        for batch in train[torch.randperm(len(train))][:448].split(32):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
    scores.append(accuracy(model, x[test], y[test]))
    print(f"fold {fold}: {scores[-1]:.3f}")
print(f"mean {sum(scores) / len(scores):.3f}")
