"""Find rare frauds in a table of payments."""

import numpy as np
import torch
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

torch.manual_seed(0)
x, y = make_classification(
    4000, n_features=20, n_informative=8, weights=[0.95], class_sep=1.2, random_state=0
)
x = (x - x.mean(0)) / x.std(0)
x_train, x_test, y_train, y_test = train_test_split(x, y, stratify=y, random_state=0)
weights = np.where(y_train == 1, 0.5 / y_train.mean(), 0.5 / (1 - y_train.mean()))
sampler = WeightedRandomSampler(torch.tensor(weights), len(weights))
dataset = TensorDataset(torch.tensor(x_train, dtype=torch.float32), torch.tensor(y_train))
loader = DataLoader(dataset, batch_size=64, sampler=sampler)

model = nn.Sequential(
    nn.Linear(20, 64), nn.BatchNorm1d(64), nn.LeakyReLU(0.1),
    nn.Linear(64, 32), nn.BatchNorm1d(32), nn.LeakyReLU(0.1),
    nn.Linear(32, 2),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
for epoch in range(8):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        found = model(torch.tensor(x_test, dtype=torch.float32)).argmax(1).numpy()
    recall = (found[y_test == 1] == 1).mean()
    print(f"epoch {epoch}: loss {loss.item():.3f}, frauds found {recall:.3f}")
