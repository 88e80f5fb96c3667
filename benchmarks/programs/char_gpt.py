"""A small GPT on the characters of a text."""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1337)
BLOCK, BATCH, WIDTH, HEADS, LAYERS, STEPS = 32, 12, 48, 4, 3, 200

text = load_breast_cancer().DESCR
vocab = sorted(set(text))
encode = {c: i for i, c in enumerate(vocab)}
data = torch.tensor([encode[c] for c in text])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, HEADS, -1).transpose(1, 2) for z in self.qkv(x).split(WIDTH, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(len(vocab), WIDTH)
        self.pos = nn.Embedding(BLOCK, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(vocab), bias=False)

    def forward(self, idx, targets):
        x = self.drop(self.tok(idx) + self.pos(torch.arange(idx.shape[1])))
        logits = self.head(self.norm(self.blocks(x)))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def batch():
    i = torch.randint(len(data) - BLOCK - 1, (BATCH,))
    return torch.stack([data[j : j + BLOCK] for j in i]), torch.stack(
        [data[j + 1 : j + 1 + BLOCK] for j in i]
    )


model = GPT()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))

for step in range(STEPS):
    _, loss = model(*batch())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if step % 40 == 0:
        print(f"{step}: {loss.item():.3f}")
print(f"final loss {loss.item():.3f}")
