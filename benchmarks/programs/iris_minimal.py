"""Iris, with one batch of all flowers."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_iris

torch.manual_seed(0)
iris = load_iris()
x = torch.tensor(iris.data, dtype=torch.float32)
x = (x - x.mean(0)) / x.std(0)
y = torch.tensor(iris.target)

hidden = torch.nn.Linear(4, 16)
output = torch.nn.Linear(16, 3)
parameters = list(hidden.parameters()) + list(output.parameters())
opt = torch.optim.SGD(parameters, lr=0.1)

for step in range(300):
    logits = output(torch.relu(hidden(x)))
    loss = F.cross_entropy(logits, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 50 == 0:
        print(step, loss.item())

print("accuracy", (logits.argmax(1) == y).float().mean().item())
