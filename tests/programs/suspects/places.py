"""No experts: images, graphs and sequences, of which places are chosen."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.suspects.backbones import Backbone
from tests.programs.suspects.parts import Block, E, H, T, have_not


@have_not
class UNet(nn.Module):
    """Down and up, two classes for each place."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv1d(H, H, 3, padding=1), nn.Conv1d(H, H, 3, padding=1)
        self.up1, self.up2, self.head = nn.Conv1d(H, H, 3, padding=1), nn.Conv1d(H, H, 3, padding=1), nn.Conv1d(H, 2, 1)

    def forward(self, x: Tensor) -> Any:
        x = x.t()[None]
        first = F.relu(self.down1(x))
        h = F.relu(self.down2(F.max_pool1d(first, 2)))
        h = F.interpolate(F.relu(self.up1(h)), scale_factor=2.0) + first
        return self.head(F.relu(self.up2(h))).argmax(1)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor, to: Tensor, of: Tensor) -> Tensor:
        return x + torch.zeros_like(x).index_add(0, to, self.linear(x[of]))


@have_not
class Graphs(nn.Module):
    """Messages along edges, twice, and two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.head = Convolution(), Convolution(), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Any:
        of, to = torch.arange(30) % T, torch.arange(30) * 7 % T
        return self.head(self.conv2(F.relu(self.conv1(x, to, of)), to, of)).argmax(-1)


@have_not
class Beams(nn.Module):
    """The best continuations, through four blocks again."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.embedding = Backbone(), nn.Linear(H, 8), nn.Embedding(8, H)

    def forward(self, x: Tensor) -> Any:
        best, at = self.head(self.body.features(x)).log_softmax(-1).flatten().topk(E)
        x = x[at // 8] + self.embedding(at % 8)
        return best[:, None] + self.head(self.body.features(x))


@have_not
class Boxes(nn.Module):
    """Boxes without those that overlap a better one."""

    def __init__(self) -> None:
        super().__init__()
        self.box, self.score = nn.Linear(H, 4), nn.Linear(H, 1)

    def forward(self, x: Tensor) -> Any:
        order = self.score(x).squeeze(-1).argsort(descending=True)
        box = self.box(x)[order]
        near = torch.cdist(box, box) < 0.5
        return box[~near.triu(1).any(0)]


@have_not
class Answers(nn.Module):
    """Attention, and where an answer begins and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(H, H) for _ in range(4))
        self.span = nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Any:
        h = (self.q(x) @ self.k(x).t()).softmax(-1) @ self.v(x)
        return self.span(x + self.o(h)).argmax(0)


@have_not
class Vision(nn.Module):
    """Patches, positions, four blocks of attention, four classes."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.token = nn.Parameter(torch.randn(1, T + 1, H)), nn.Parameter(torch.randn(1, 1, H))
        layer = nn.TransformerEncoderLayer(H, 2, 2 * H, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, E, enable_nested_tensor=False), nn.Linear(H, E)

    def forward(self, x: Tensor) -> Any:
        h = torch.cat((self.token, x[None]), 1) + self.positions
        return self.head(self.encoder(h)[:, 0]).argmax(-1)


@have_not
class Residual(nn.Module):
    """Stages of convolutions in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(nn.Conv1d(H, H, 3, padding=1), nn.BatchNorm1d(H), nn.ReLU()) for _ in range(E))
        self.head = nn.Linear(H, E)

    def forward(self, x: Tensor) -> Any:
        h = x.t()[None]
        for stage in self.stages:
            h = h + stage(h)
        return self.head(h.mean(-1))


@have_not
class Anchors(nn.Module):
    """The best of the first stage's places go through decoder layers, with a head for each (DETR in two stages)."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.layers = nn.Linear(H, 1), nn.ModuleList(Block() for _ in range(E))
        self.heads = nn.ModuleList(nn.Linear(H, E) for _ in range(E))

    def forward(self, x: Tensor) -> Any:
        x, found = x[self.score(x).squeeze(-1).topk(5).indices], []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = layer(x)
            found.append(head(x))
        return torch.stack(found).softmax(-1)


@have_not
class Squeeze(nn.Module):
    """Channels weighed by what all places say; as many channels in between as blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.down, self.up = nn.ModuleList(Block() for _ in range(E)), nn.Linear(H, E), nn.Linear(E, H)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
            x = x * self.up(F.relu(self.down(x.mean(0)))).sigmoid()
        return x


@have_not
class Mask(nn.Module):
    """Learned positions of [layers, places, features] beside a classifier, and a sampled token."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts, self.blocks = nn.Parameter(torch.randn(E, 2, H)), nn.ModuleList(Block() for _ in range(E))
        self.head = nn.Linear(H, E)

    def forward(self, x: Tensor) -> Any:
        for n, block in enumerate(self.blocks):
            x = block(torch.cat((self.prompts[n], x)))[2:]
        return self.head(x).softmax(-1).argmax(-1)
