import torch
from torch import nn


class SwitchFeedForward(nn.Module):
    def __init__(self, d_model=32, d_ff=64, n_experts=4, is_scale_prob=True):
        super().__init__()
        self.n_experts = n_experts
        self.is_scale_prob = is_scale_prob
        self.switch = nn.Linear(d_model, n_experts)
        self.softmax = nn.Softmax(dim=-1)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Dropout(0.0), nn.Linear(d_ff, d_model)) for _ in range(n_experts)
        )

    def forward(self, x: torch.Tensor):
        seq_len, batch_size, d_model = x.shape
        x = x.view(-1, d_model)
        route_prob = self.softmax(self.switch(x))
        route_prob_max, routes = torch.max(route_prob, dim=-1)
        indexes_list = [torch.eq(routes, i).nonzero(as_tuple=True)[0] for i in range(self.n_experts)]
        final_output = x.new_zeros(x.shape)
        counts = x.new_tensor([len(indexes_list[i]) for i in range(self.n_experts)])
        expert_output = [self.experts[i](x[indexes_list[i], :]) for i in range(self.n_experts)]
        for i in range(self.n_experts):
            final_output[indexes_list[i], :] = expert_output[i]
        if self.is_scale_prob:
            final_output = final_output * route_prob_max.view(-1, 1)
        else:
            final_output = final_output * (route_prob_max / route_prob_max.detach()).view(-1, 1)
        return final_output.view(seq_len, batch_size, d_model), counts, route_prob.sum(0), route_prob_max


def make():
    torch.manual_seed(3)
    return SwitchFeedForward(), (torch.randn(7, 3, 32),)
