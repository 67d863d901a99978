import torch
import torch.nn as nn


class SparseDispatcher:
    def __init__(self, num_experts, gates):
        self._gates, self._num_experts = gates, num_experts
        sorted_experts, index_sorted_experts = torch.nonzero(gates).sort(0)
        _, self._expert_index = sorted_experts.split(1, dim=1)
        self._batch_index = torch.nonzero(gates)[index_sorted_experts[:, 1], 0]
        self._part_sizes = (gates > 0).sum(0).tolist()
        gates_exp = gates[self._batch_index.flatten()]
        self._nonzero_gates = torch.gather(gates_exp, 1, self._expert_index)

    def dispatch(self, inp):
        return torch.split(inp[self._batch_index].squeeze(1), self._part_sizes, dim=0)

    def combine(self, expert_out):
        stitched = torch.cat(expert_out, 0).mul(self._nonzero_gates)
        zeros = torch.zeros(self._gates.size(0), expert_out[-1].size(1))
        return zeros.index_add(0, self._batch_index, stitched.float())


class MLP(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.fc1, self.fc2, self.relu = nn.Linear(d, h), nn.Linear(h, d), nn.ReLU()

    def forward(self, x):
        return self.fc2(self.relu(self.fc1(x)))


def cv_squared(x):
    return x.float().var() / (x.float().mean() ** 2 + 1e-10)


class ShazeerMoE(nn.Module):
    def __init__(self, d=16, h=32, num_experts=6, k=2):
        super().__init__()
        self.num_experts, self.k = num_experts, k
        self.experts = nn.ModuleList([MLP(d, h) for _ in range(num_experts)])
        self.w_gate = nn.Parameter(torch.randn(d, num_experts) * 0.3)
        self.softmax = nn.Softmax(1)

    def forward(self, x, loss_coef=1e-2):
        logits = self.softmax(x @ self.w_gate)
        top_logits, top_indices = logits.topk(min(self.k + 1, self.num_experts), dim=1)
        top_k_logits, top_k_indices = top_logits[:, : self.k], top_indices[:, : self.k]
        top_k_gates = top_k_logits / (top_k_logits.sum(1, keepdim=True) + 1e-6)
        gates = torch.zeros_like(logits).scatter(1, top_k_indices, top_k_gates)
        loss = (cv_squared(gates.sum(0)) + cv_squared((gates > 0).sum(0))) * loss_coef
        dispatcher = SparseDispatcher(self.num_experts, gates)
        expert_inputs = dispatcher.dispatch(x)
        expert_outputs = [self.experts[i](expert_inputs[i]) for i in range(self.num_experts)]
        return dispatcher.combine(expert_outputs), loss


def make():
    torch.manual_seed(10)
    return ShazeerMoE(), (torch.randn(18, 16),)
