"""A transformer that reads handwritten digits row by row."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(11)


class RowTransformer(nn.Module):
    def __init__(self, width=32, layers=2):
        super().__init__()
        self.input = nn.Linear(8, width)
        self.position = nn.Parameter(torch.randn(8, width) * 0.1)
        layer = nn.TransformerEncoderLayer(
            width, 4, 64, dropout=0.1, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, 10)

    def forward(self, rows):
        x = self.input(rows) + self.position
        x = self.encoder(x)
        return self.output(self.norm(x.mean(1)))


def run_epoch(model, loader, criterion, optimizer=None):
    model.train(optimizer is not None)
    losses, hits = 0.0, 0
    with torch.set_grad_enabled(optimizer is not None):
        for rows, labels in loader:
            logits = model(rows)
            loss = criterion(logits, labels)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses += loss.item() * len(labels)
            hits += (logits.argmax(1) == labels).sum().item()
    return losses / len(loader.dataset), hits / len(loader.dataset)


digits = load_digits()
images = (torch.tensor(digits.images, dtype=torch.float32) - 4.9) / 6.0
labels = torch.tensor(digits.target)
train_loader = DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=50, shuffle=True)
test_loader = DataLoader(TensorDataset(images[1400:], labels[1400:]), batch_size=100)
model = RowTransformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
criterion = nn.CrossEntropyLoss()
for epoch in range(8):
    train_loss, _ = run_epoch(model, train_loader, criterion, optimizer)
    _, accuracy = run_epoch(model, test_loader, criterion)
    print(f"epoch {epoch}: loss {train_loss:.3f}, accuracy {accuracy:.3f}")
