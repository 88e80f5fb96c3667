"""Several labels for each text, with a bag of words."""

import torch
from torch import nn

torch.manual_seed(0)
WORDS, LABELS, TEXTS = 300, 8, 1600
topics = torch.rand(LABELS, WORDS) < 0.04
labels = (torch.rand(TEXTS, LABELS) < 0.25).float()
rates = 0.02 + labels @ topics.float() * 0.3
words = torch.poisson(rates)
words = torch.log1p(words)

model = nn.Sequential(nn.Linear(WORDS, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, LABELS))
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

for epoch in range(10):
    model.train()
    for batch in torch.randperm(1280).split(40):
        optimizer.zero_grad()
        loss = criterion(model(words[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = ((model(words[1280:]) > 0) == labels[1280:].bool()).float().mean().item()
    print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {right:.3f}")
