"""The classic example's network, with log_softmax and nll_loss, on scikit-learn's digits."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.3)
        self.fc1 = nn.Linear(128, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = self.dropout2(x)
        x = self.fc2(x)
        return F.log_softmax(x, dim=1)


def train(model, data, optimizer, epoch):
    model.train()
    for batch_idx, (images, target) in enumerate(data):
        optimizer.zero_grad()
        output = model(images)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % 10 == 0:
            print(f"epoch {epoch} [{batch_idx}] loss {loss.item():.6f}")


def test(model, images, target):
    model.eval()
    with torch.no_grad():
        output = model(images)
    print(f"accuracy {(output.argmax(1) == target).float().mean().item():.3f}")


def main():
    torch.manual_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None]
    images = (images / 16 - 0.3053) / 0.3763
    target = torch.tensor(digits.target)
    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, 7):
        order = torch.randperm(1440)
        batches = [(images[b], target[b]) for b in order.split(64)]
        train(model, batches, optimizer, epoch)
        test(model, images[1440:], target[1440:])
        scheduler.step()


if __name__ == "__main__":
    main()
