"""Reverse a sequence of numbers with an encoder and a decoder."""

import torch
from torch import nn

torch.manual_seed(0)
SYMBOLS, LENGTH, START = 12, 5, 0


class Seq2Seq(nn.Module):
    def __init__(self, dim=24, hidden=64):
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, dim)
        self.encoder = nn.GRU(dim, hidden, batch_first=True)
        self.decoder = nn.GRU(dim, hidden, batch_first=True)
        self.output = nn.Linear(hidden, SYMBOLS)

    def forward(self, source, target):
        _, state = self.encoder(self.embedding(source))
        shifted = torch.cat([torch.full_like(target[:, :1], START), target[:, :-1]], 1)
        out, _ = self.decoder(self.embedding(shifted), state)
        return self.output(out)


model = Seq2Seq()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
criterion = nn.CrossEntropyLoss()
for step in range(400):
    source = torch.randint(1, SYMBOLS, (48, LENGTH))
    target = source.flip(1)
    logits = model(source, target)
    loss = criterion(logits.transpose(1, 2), target)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 80 == 0:
        print(f"{step}: {loss.item():.4f}")
print(f"accuracy {(logits.argmax(2) == target).float().mean().item():.3f}")
