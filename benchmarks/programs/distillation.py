"""Teach a small network with a larger one."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(12)
digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
y = torch.tensor(digits.target)

teacher = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 10))
optimizer = torch.optim.Adam(teacher.parameters(), lr=2e-3)
for _ in range(6):
    for batch in torch.randperm(1400).split(50):
        optimizer.zero_grad()
        F.cross_entropy(teacher(x[batch]), y[batch]).backward()
        optimizer.step()
teacher.eval()

student = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
student_optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
TEMPERATURE = 3.0
for epoch in range(12):
    for batch in torch.randperm(1400).split(50):
        with torch.no_grad():
            soft = F.softmax(teacher(x[batch]) / TEMPERATURE, dim=1)
        logits = student(x[batch])
        distance = F.kl_div(F.log_softmax(logits / TEMPERATURE, dim=1), soft, reduction="batchmean")
        loss = distance * TEMPERATURE**2 + 0.3 * F.cross_entropy(logits, y[batch])
        student_optimizer.zero_grad()
        loss.backward()
        student_optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
with torch.no_grad():
    print(f"accuracy {(student(x[1400:]).argmax(1) == y[1400:]).float().mean().item():.3f}")
