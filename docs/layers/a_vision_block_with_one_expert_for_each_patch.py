import torch
from torch import nn


class Mlp(nn.Module):
    def __init__(self, dim, hidden, drop=0.0):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class VMoEBlock(nn.Module):
    def __init__(self, dim=32, num_experts=4, mlp_ratio=2.0, init_values=0.5):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gate = nn.Linear(dim, num_experts)
        self.experts = nn.ModuleList([Mlp(dim, int(dim * mlp_ratio)) for _ in range(num_experts)])
        self.gamma = nn.Parameter(init_values * torch.ones(dim))
        self.shared = Mlp(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        shortcut = x
        x = self.norm(x)
        prob = self.gate(x).softmax(-1)
        top1 = prob.argmax(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            sel = top1 == i
            if sel.sum() == 0:
                continue
            y[sel] = expert(x[sel]) * prob[sel][:, i : i + 1]
        y = y + self.shared(x)
        return shortcut + self.gamma * y


def make():
    torch.manual_seed(6)
    return VMoEBlock(), (torch.randn(2, 10, 32),)
