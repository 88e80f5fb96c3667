"""Factorise a matrix of ratings."""

import torch
from torch import nn

torch.manual_seed(0)
USERS, FILMS, RATINGS = 200, 120, 6000
taste, style = torch.randn(USERS, 4), torch.randn(FILMS, 4)
users, films = torch.randint(USERS, (RATINGS,)), torch.randint(FILMS, (RATINGS,))
ratings = (3 + (taste[users] * style[films]).sum(1) * 0.6 + 0.2 * torch.randn(RATINGS)).clamp(1, 5)


class Factors(nn.Module):
    def __init__(self, rank=6):
        super().__init__()
        self.user = nn.Embedding(USERS, rank)
        self.film = nn.Embedding(FILMS, rank)
        self.bias = nn.Parameter(torch.tensor(3.0))
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.film.weight, std=0.1)

    def forward(self, user, film):
        return self.bias + (self.user(user) * self.film(film)).sum(-1)


model = Factors()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-5)
for epoch in range(10):
    order = torch.randperm(5000)
    for batch in order.split(128):
        loss = nn.functional.mse_loss(model(users[batch], films[batch]), ratings[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
with torch.no_grad():
    error = nn.functional.mse_loss(model(users[5000:], films[5000:]), ratings[5000:]).item()
print(f"test error {error:.3f}")
