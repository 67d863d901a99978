"""No experts: several of the same beside each other, which all run."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.suspects.parts import E, Expert, H, T, have_not


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(Expert() for _ in range(E))

    def forward(self, x: Tensor) -> Any:
        return torch.stack([member(x) for member in self.members]).mean(0)


have_not(Ensemble)


@have_not
class Votes(Ensemble):
    """An ensemble that agrees on a class."""

    def forward(self, x: Tensor) -> Any:
        p = torch.stack([member(x).softmax(-1) for member in self.members])
        return p.mean(0), p.mean(0).argmax(-1), p.var(0)


@have_not
class Minimum(Ensemble):
    """The lowest of several values."""

    def forward(self, x: Tensor) -> Any:
        return torch.stack([member(x) for member in self.members]).min(0).values


@have_not
class Critics(nn.Module):
    """Four critics beside a policy of four actions."""

    def __init__(self) -> None:
        super().__init__()
        self.critics, self.policy = nn.ModuleList(nn.Linear(H, E) for _ in range(E)), nn.Linear(H, E)

    def forward(self, x: Tensor) -> Any:
        logits = self.policy(x)
        values = torch.stack([critic(x) for critic in self.critics])
        return logits.log_softmax(-1), values.mean(0), values.std(0)


@have_not
class Hashes(nn.Module):
    """Four tables of embeddings, and four outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.head = nn.ModuleList(nn.Embedding(9, H) for _ in range(E)), nn.Linear(H, E)

    def forward(self, x: Tensor) -> Any:
        keys = (x[:, :1] * 100).long()
        h = sum(table((keys * (n + 3) % 9).squeeze(1)) for n, table in enumerate(self.tables))
        return self.head(x + h)


@have_not
class Levels(nn.Module):
    """One layer for the rows of each level, with another factor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Any:
        level, out = torch.arange(T) % 3, torch.zeros_like(x)
        for k in range(3):
            rows = torch.where(level == k)[0]
            out[rows] = self.linear(x[rows]) * (k + 1)
        return out


@have_not
class Pooling(Levels):
    """The sum of each group, through one layer."""

    def forward(self, x: Tensor) -> Any:
        group = torch.arange(T) % E
        return torch.stack([self.linear(x[(group == g).nonzero().squeeze(-1)]).sum(0) for g in range(E)])


@have_not
class Towers(nn.Module):
    """Two towers on one trunk, and a domain of two."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.click, self.buy, self.domain = nn.Linear(H, H), Expert(), Expert(), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.trunk(x))
        return self.click(h).sigmoid() * self.buy(h).sigmoid(), self.domain(h).softmax(-1)


@have_not
class Codes(nn.Module):
    """Residual quantisation with four books, and four outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.books, self.head = nn.ParameterList(nn.Parameter(torch.randn(8, H)) for _ in range(E)), nn.Linear(H, E)

    def forward(self, x: Tensor) -> Any:
        left, total = x, torch.zeros_like(x)
        for book in self.books:
            code = F.embedding(torch.cdist(left, book).argmin(-1), book)
            left, total = left - code, total + code
        return self.head(x + (total - x).detach()).softmax(-1)


@have_not
class Cell(nn.Module):
    """Four gates of a recurrent cell, and four outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.head = nn.ModuleList(nn.Linear(H, H) for _ in range(E)), nn.Linear(H, E)

    def forward(self, x: Tensor) -> Any:
        state = torch.zeros(H)
        for row in x[:3]:
            i, f, o, g = (gate(row + state) for gate in self.gates)
            state = o.sigmoid() * torch.tanh(f.sigmoid() * state + i.sigmoid() * g.tanh())
        return self.head(state).argmax()


@have_not
class Streams(nn.Module):
    """Two streams, weighed softly by a gate: both always run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.image, self.text = nn.Linear(H, 2), Expert(), Expert()

    def forward(self, x: Tensor) -> Any:
        p = self.gate(x).softmax(-1)
        return p[:, :1] * self.image(x) + p[:, 1:] * self.text(x.flip(0))


@have_not
class Contrast(nn.Module):
    """Two encoders of one kind, all pairs compared."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.head = Expert(), Expert(), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Any:
        pairs = self.image(x) @ self.text(x.flip(0)).t()
        return pairs.softmax(-1), pairs.argmax(-1), self.head(x).softmax(-1)
