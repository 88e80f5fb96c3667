"""Find discs in noisy images with a small U-Net."""

import torch
from torch import nn

torch.manual_seed(6)


def make_images(n, size=24):
    ys, xs = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    centre = torch.randint(6, size - 6, (n, 2, 1, 1))
    radius = torch.randint(3, 7, (n, 1, 1))
    masks = ((ys - centre[:, 0]) ** 2 + (xs - centre[:, 1]) ** 2 < radius**2).float()
    images = masks + 0.5 * torch.randn(n, size, size)
    return images.unsqueeze(1), masks.unsqueeze(1)


def conv(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = conv(1, 8), conv(8, 16)
        self.bottom = conv(16, 16)
        self.up2, self.up1 = conv(32, 8), conv(16, 8)
        self.out = nn.Conv2d(8, 1, 1)
        self.pool = nn.MaxPool2d(2)
        self.upsample = nn.Upsample(scale_factor=2)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.bottom(self.pool(b))
        b = self.up2(torch.cat([b, self.upsample(c)], 1))
        a = self.up1(torch.cat([a, self.upsample(b)], 1))
        return self.out(a)


def dice_loss(logits, masks):
    probabilities = torch.sigmoid(logits)
    overlap = (probabilities * masks).sum((1, 2, 3))
    return (
        1 - ((2 * overlap + 1) / (probabilities.sum((1, 2, 3)) + masks.sum((1, 2, 3)) + 1)).mean()
    )


images, masks = make_images(320)
model = UNet()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(6):
    for start in range(0, 256, 16):
        logits = model(images[start : start + 16])
        loss = dice_loss(logits, masks[start : start + 16])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        test = dice_loss(model(images[256:]), masks[256:]).item()
    print(f"epoch {epoch}: {loss.item():.3f}, test {test:.3f}")
