"""Predict the next character of a text with an LSTM."""

import torch
from sklearn.datasets import load_diabetes, load_wine
from torch import nn

torch.manual_seed(0)
text = load_wine().DESCR + load_diabetes().DESCR
chars = sorted(set(text))
index = {c: i for i, c in enumerate(chars)}
data = torch.tensor([index[c] for c in text])


class CharLSTM(nn.Module):
    def __init__(self, vocab, dim=32, hidden=96):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, tokens):
        embedded = self.embed(tokens)
        out, _ = self.lstm(embedded)
        return self.head(out)


def get_batch(size=16, length=40):
    starts = torch.randint(len(data) - length - 1, (size,))
    x = torch.stack([data[s : s + length] for s in starts])
    y = torch.stack([data[s + 1 : s + length + 1] for s in starts])
    return x, y


model = CharLSTM(len(chars))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)

for step in range(250):
    x, y = get_batch()
    logits = model(x)
    loss = criterion(logits.reshape(-1, len(chars)), y.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
print(f"final loss {loss.item():.3f}")
