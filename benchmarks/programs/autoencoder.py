"""Compress handwritten digits to eight numbers and back."""

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(2)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 8)
        )

    def forward(self, x):
        return self.net(x)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 24),
            nn.ReLU(),
            nn.Linear(24, 48),
            nn.ReLU(),
            nn.Linear(48, 64),
            nn.Sigmoid(),
        )

    def forward(self, code):
        return self.net(code)


def main():
    pixels = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    encoder, decoder = Encoder(), Decoder()
    optimizer = torch.optim.Adam(list(encoder.parameters()) + list(decoder.parameters()), lr=2e-3)
    mse = nn.MSELoss()
    for epoch in range(12):
        for batch in pixels[torch.randperm(len(pixels))].split(64):
            code = encoder(batch)
            loss = mse(decoder(code), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.5f}")


if __name__ == "__main__":
    main()
