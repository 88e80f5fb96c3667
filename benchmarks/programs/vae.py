"""A variational autoencoder of handwritten digits."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)


class VAE(nn.Module):
    def __init__(self, latent=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.mu = nn.Linear(64, latent)
        self.log_var = nn.Linear(64, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x):
        h = self.encoder(x)
        mu, log_var = self.mu(h), self.log_var(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * log_var)
        return self.decoder(z), mu, log_var


def loss_function(reconstruction, x, mu, log_var):
    bce = F.binary_cross_entropy_with_logits(reconstruction, x, reduction="sum")
    kld = -0.5 * torch.sum(1 + log_var - mu.pow(2) - log_var.exp())
    return (bce + kld) / len(x)


images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(15):
    total = 0.0
    for x in images[torch.randperm(len(images))].split(100):
        optimizer.zero_grad()
        reconstruction, mu, log_var = model(x)
        loss = loss_function(reconstruction, x, mu, log_var)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
    print(f"epoch {epoch}: {total / len(images):.2f}")
