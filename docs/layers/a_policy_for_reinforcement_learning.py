import torch
import torch.nn as nn


def mlp(sizes, activation=nn.Tanh, output_activation=nn.Identity):
    layers = []
    for j in range(len(sizes) - 1):
        act = activation if j < len(sizes) - 2 else output_activation
        layers += [nn.Linear(sizes[j], sizes[j + 1]), act()]
    return nn.Sequential(*layers)


class MoETrunk(nn.Module):
    def __init__(self, obs_dim=24, feat_dim=24, hid=32, n_experts=5, top_k=2):
        super().__init__()
        self.router = mlp([obs_dim, 16, n_experts])
        self.experts = nn.ModuleList([mlp([obs_dim, hid, hid, feat_dim]) for _ in range(n_experts)])
        self.top_k = top_k
        self.pi = nn.Linear(feat_dim, 4)

    def forward(self, obs):
        prob = torch.softmax(self.router(obs), -1)
        w, ids = torch.topk(prob, self.top_k, -1, sorted=False)
        w = w / w.sum(-1, keepdim=True)
        rep = obs.repeat_interleave(self.top_k, dim=0)
        flat_ids = ids.view(-1)
        y = torch.empty(rep.shape[0], 24)
        for i, ex in enumerate(self.experts):
            y[flat_ids == i] = ex(rep[flat_ids == i]).to(y.dtype)
        y = (y.view(*w.shape, -1) * w.unsqueeze(-1)).sum(dim=1)
        return self.pi(torch.tanh(y)), prob


def make():
    torch.manual_seed(12)
    return MoETrunk(), (torch.randn(16, 24),)
