"""Classify handwritten digits with a multilayer perceptron."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
EPOCHS = 15
LEARNING_RATE = 1e-3

images, labels = load_digits(return_X_y=True)
images = images / 16.0
train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, random_state=0)
train_x = torch.tensor(train_x, dtype=torch.float32)
train_y = torch.tensor(train_y)
test_x = torch.tensor(test_x, dtype=torch.float32)
test_y = torch.tensor(test_y)
loader = DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True)

model = nn.Sequential(
    nn.Linear(64, 128),
    nn.ReLU(),
    nn.Linear(128, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

for epoch in range(EPOCHS):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: loss {total / len(loader):.4f}")

with torch.no_grad():
    accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
print(f"test accuracy {accuracy:.3f}")
