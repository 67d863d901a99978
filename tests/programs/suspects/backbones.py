"""No experts: blocks one behind the other, and a head of as many classes."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.suspects.parts import Block, E, H, Layer, have_not

log = logging.getLogger(__name__)


class Backbone(nn.Module):
    """As many equal blocks as classes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(E)), nn.Linear(H, E)

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x))


have_not(Backbone)


@have_not
class Classes(Backbone):
    """A class is chosen by the head."""

    def forward(self, x: Tensor) -> Any:
        scores = self.head(self.features(x))
        return scores.softmax(-1), scores.argmax(-1), scores.topk(2).indices


@have_not
class BreakBehind(Backbone):
    """The graph breaks between blocks and head."""

    def forward(self, x: Tensor) -> Any:
        x = self.features(x)
        if x.sum() > 0:
            x = x * 2
        return self.head(x).argmax(-1)


@have_not
class BreakAmong(Backbone):
    """The graph breaks in each block."""

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x)).topk(2)


class OutOfGraphs(Backbone):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x)).softmax(-1).argmax(-1)


@have_not
class HoldingOutOfGraphs(nn.Module):
    """A classifier that is kept away from Dynamo."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(H, H), OutOfGraphs()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.first(x))  # type: ignore[no-any-return]


@have_not
class EarlyExit(Backbone):
    """Blocks run until the head is sure."""

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
            if self.head(x).softmax(-1).max().item() > 0.99:
                break
        return self.head(x)


@have_not
class Pruning(Backbone):
    """Each block is followed by one token less; T is the number of blocks, by chance, at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(H, 1)

    def forward(self, x: Tensor) -> Any:
        x = x[None, : E + 3]
        for block in self.blocks:
            x = block(x)
            kept = self.score(x).squeeze(-1).topk(x.shape[1] - 1, dim=-1)[1]
            x = x.gather(1, kept[..., None].expand(-1, -1, H))
        return x


@have_not
class Narrow(nn.Module):
    """As many features as blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(H, E), nn.ModuleList(nn.Linear(E, E) for _ in range(E))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = x + F.relu(block(x)) * x.mean()
        return x.softmax(-1)


@have_not
class Unused(nn.Module):
    """A second layer that this call does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor, both: bool = False) -> Any:
        return self.second(self.first(x)) if both else self.first(x)


@have_not
class UnusedBehindBreak(Unused):
    """As above, and there is a break."""

    def forward(self, x: Tensor, both: bool = False) -> Any:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x) if both else x * 2


@have_not
class Recycled(Backbone):
    """As many rounds as blocks, and the last one is another; rows without a value are left out before."""

    def forward(self, x: Tensor) -> Any:
        x = x[x.isfinite().all(-1)]
        for n, block in enumerate(self.blocks):
            last = n == E - 1
            x = block(x)
            if n == 0 or not last:
                x = x * 0.5
        return self.head(x).max(-1)


@have_not
class Numbers(nn.Module):
    """A classifier that logs how many rows it has left."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Any:
        rows = torch.where(x[:, 0] > -10)[0]
        log.info("rows %d", rows.numel())
        return self.fc(F.relu(self.conv2(F.relu(self.conv1(x[rows]))))).softmax(-1).argmax(-1)
