"""Tell friendly from unfriendly reviews with a GRU; the reviews are made up of words with a mood."""

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

random.seed(0)
torch.manual_seed(0)
GOOD, BAD, NEUTRAL = range(1, 20), range(20, 39), range(39, 200)


def review(mood):
    words = random.choices(NEUTRAL, k=random.randint(6, 18))
    for _ in range(random.randint(2, 5)):
        words.insert(random.randrange(len(words)), random.choice(GOOD if mood else BAD))
    return torch.tensor(words)


class Reviews(Dataset):
    def __init__(self, size):
        self.labels = [i % 2 for i in range(size)]
        self.texts = [review(mood) for mood in self.labels]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.texts[i], self.labels[i]


def collate(pairs):
    texts, labels = zip(*pairs, strict=True)
    lengths = torch.tensor([len(t) for t in texts])
    return pad_sequence(texts, batch_first=True), lengths, torch.tensor(labels)


class Sentiment(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(200, 24, padding_idx=0)
        self.gru = nn.GRU(24, 48, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(48, 2)

    def forward(self, texts, lengths):
        states, _ = self.gru(self.embedding(texts))
        last = states[torch.arange(len(texts)), lengths - 1]
        return self.fc(self.dropout(last))


train_loader = DataLoader(Reviews(1200), batch_size=32, shuffle=True, collate_fn=collate)
test_loader = DataLoader(Reviews(300), batch_size=100, collate_fn=collate)
model = Sentiment()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
criterion = nn.CrossEntropyLoss()

for epoch in range(5):
    model.train()
    for texts, lengths, labels in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(texts, lengths), labels)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(t, n).argmax(1) == y).sum().item() for t, n, y in test_loader)
    print(f"epoch {epoch}, loss {loss.item():.3f}, accuracy {right / 300:.3f}")
