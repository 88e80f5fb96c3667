"""Predict the progress of diabetes after a year: regression of a table."""

import torch
from sklearn.datasets import load_diabetes
from torch import nn

torch.manual_seed(7)
data = load_diabetes()
features = torch.tensor(data.data, dtype=torch.float32)
features = (features - features.mean(0)) / features.std(0)
target = torch.tensor(data.target, dtype=torch.float32)
mean, std = target.mean(), target.std()
target = (target - mean) / std
target = target.unsqueeze(1)
x_train, x_test = features[:350], features[350:]
y_train, y_test = target[:350], target[350:]

model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))
loss_fn = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for epoch in range(40):
    for start in range(0, 350, 35):
        x, y = x_train[start : start + 35], y_train[start : start + 35]
        prediction = model(x)
        loss = loss_fn(prediction, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    residual = (model(x_test).reshape(-1) - y_test.reshape(-1)) * std
print(f"test error {residual.abs().mean():.1f}")
