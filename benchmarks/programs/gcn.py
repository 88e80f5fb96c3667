"""Find communities in a graph with a graph convolution network."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
NODES, CLASSES = 400, 4
labels = torch.arange(NODES) % CLASSES
same = labels[:, None] == labels[None]
edges = torch.rand(NODES, NODES) < torch.where(same, 0.12, 0.02)
edges = torch.triu(edges, 1)
adjacency = (edges | edges.T).float() + torch.eye(NODES)
degree = adjacency.sum(1)
adjacency = adjacency / (degree[:, None] * degree[None]).sqrt()
features = F.one_hot(labels, CLASSES).float() + 1.5 * torch.randn(NODES, CLASSES)
train_mask = torch.rand(NODES) < 0.3


class GCN(nn.Module):
    def __init__(self, layers=4, width=32):
        super().__init__()
        widths = [CLASSES, *[width] * (layers - 1), CLASSES]
        self.linears = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(widths)])

    def forward(self, x):
        for linear in self.linears[:-1]:
            x = F.relu(adjacency @ linear(x))
        return adjacency @ self.linears[-1](x)


model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(150):
    out = model(features)
    loss = F.cross_entropy(out[train_mask], labels[train_mask])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 30 == 0:
        print(f"{epoch}: {loss.item():.4f}")
accuracy = (out.argmax(1) == labels)[~train_mask].float().mean().item()
print(f"accuracy {accuracy:.3f}")
