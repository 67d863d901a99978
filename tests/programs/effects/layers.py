"""The layers that effects are put into: spellings of a mixture of experts as source text, with places between the statements."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

E, K, H, I = 3, 2, 6, 5  # noqa: E741  (the letters of moefuse.spec)


class Expert(nn.Module):
    """An expert with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, I), nn.Linear(I, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Layer(nn.Module):
    """What every program may use; a subclass has its ``forward``. Some values say nothing until they are changed."""

    neutral = ("B", "scale", "shift", "offset", "factor")
    """Zeros and ones when a program is compiled; a test changes them before the second call."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.w_in, self.w_out = nn.Parameter(torch.randn(E, I, H) / 2), nn.Parameter(torch.randn(E, H, I) / 2)
        self.experts = nn.ModuleList(Expert() for _ in range(E))
        self.shared, self.table = nn.Linear(H, H), nn.Embedding(E, H)
        self.A, self.B = nn.Parameter(torch.randn(H, 2)), nn.Parameter(torch.zeros(2, H))
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(H))
        self.offset, self.factor = nn.Parameter(torch.zeros(E)), nn.Parameter(torch.ones(K))
        self.bias = nn.Parameter(torch.zeros(E), requires_grad=False)
        for name, size in (("usage", E), ("ema", E), ("load", E), ("mean", H), ("seen_x", H)):
            self.register_buffer(name, torch.zeros(size))
        self.register_buffer("var", torch.ones(H))
        self.register_buffer("hits", torch.zeros(E, dtype=torch.long))
        self.calls, self.number = 0, 0
        self.kept: Tensor | None = None
        self.notes: list[int] = []
        self.stats: dict[str, int] = {"rows": 0}

    def expert(self, e: int | Tensor, x: Tensor) -> Tensor:
        return F.silu(x @ self.w_in[e].t()) @ self.w_out[e].t()


STATE = {
    "self.usage": (E,), "self.ema": (E,), "self.load": (E,), "self.mean": (H,), "self.hits": (E,), "self.bias": (E,),
    "self.gate.weight": (E, H), "self.w_in": (E, I, H), "self.w_out": (E, H, I), "self.experts[0].up.weight": (I, H),
    "self.experts[1].down.weight": (H, I), "self.experts[2].up.bias": (I,), "self.shared.weight": (H, H), "self.scale": (),
    "self.shift": (H,), "self.offset": (E,), "self.table.weight": (E, H),
}  # fmt: skip
"""What outlives a call, and its shape."""

ROUTES = {
    "softmax": "scores = self.gate(x)\n@scored\nw, ids = scores.softmax(-1).topk(K, -1)",
    "renormalised": "scores = self.gate(x)\n@scored\nw, ids = scores.softmax(-1).topk(K, -1)\nw = w / w.sum(-1, keepdim=True)",
    "topk": "scores = self.gate(x)\n@scored\nw, ids = torch.topk(scores, K)\nw = w.softmax(-1)",
    "biased": "scores = self.gate(x).sigmoid()\n@scored\nids = (scores + self.bias).topk(K, -1).indices\nw = scores.gather(1, ids)",
    "sorted": "scores = self.gate(x).softmax(-1)\n@scored\nw, ids = scores.sort(-1, descending=True)\nw, ids = w[:, :K], ids[:, :K]",
}

STARTS = {
    "zeros": "out = torch.zeros_like(x)",
    "clone": "out = x.clone()",
    "new": "out = x.new_zeros(x.shape)",
    "shared": "out = self.shared(x)",
    "scaled": "out = x * 0.5",
}

EXPERTS = {"modules": "self.experts[e]({})", "stacked": "self.expert(e, {})", "open": "o"}

_OPEN = """given = {rows}
@given
h = F.silu(self.experts[e].up(given))
@hidden
o = self.experts[e].down(h)
@made
"""
"""What comes before an expert whose statements stand in the layer, so that effects may stand between them."""

ADDS = {
    "index_add_": "out.index_add_(0, tok, y)",
    "iadd": "out[tok] += y",
    "index_add": "out = out.index_add(0, tok, y)",
    "index_put_": "out.index_put_((tok,), y, accumulate=True)",
}

SUMS = {"add": "out = out + y", "add_": "out.add_(y)", "iadd": "out += y"}

SKIPS = {"numel": "if tok.numel() == 0: continue", "shape": "if tok.shape[0] == 0: continue"}

_ROWS = """
    tok, slot = torch.where(ids == e)
    {skip}
    @inside
    y = {expert} * w[tok, slot, None]
    {add}
    @between"""

BODIES = {
    "rows": "{start}\n@before\nfor e in range(E):" + _ROWS,
    "hits": "hit = (ids[..., None] == torch.arange(E)).sum((0, 1)) > 0\n{start}\n@before\nfor row in hit.nonzero():\n    e = row[0]"
    + _ROWS,
    "dense": """{start}
@before
for e in range(E):
    @inside
    y = {expert} * (w * (ids == e)).sum(-1, keepdim=True)
    {sum}
    @between""",
    "table": """weights = torch.zeros(x.shape[0], E).scatter(1, ids, w)
@tabled
{start}
@before
for e in range(E):
    @inside
    y = {expert} * weights[:, e : e + 1]
    {sum}
    @between""",
    "turned": """weights = torch.zeros(x.shape[0], E).scatter(1, ids, w)
@tabled
{start}
@before
for e in range(E):
    @inside
    y = {expert}.t() * weights[:, e]
    {sum}
    @between""",
    "turned back": """{start}
@before
for e in range(E):
    @inside
    y = {expert}.t() * (w * (ids == e)).sum(-1)
    {sum}
    @between
out = out.t()""",
    "by feature": """y = torch.einsum('tkih,th->tki', self.w_in[ids], x)
y = torch.einsum('tkhi,tki->tkh', self.w_out[ids], F.silu(y))
out = torch.einsum('tkh,tk->ht', y, w)""",
    "masks": """{start}
@before
for k in range(K):
    for e in range(E):
        mask = ids[:, k] == e
        @inside
        y = {expert} * w[:, k][mask].unsqueeze(-1)
        out[mask] += y
        @between""",
    "bmm": """rows = x.repeat_interleave(K, 0).unsqueeze(-1)
@gathered
h = F.silu(torch.bmm(self.w_in[ids.flatten()], rows))
@between
y = torch.bmm(self.w_out[ids.flatten()], h).view(-1, K, H)
out = (y * w.unsqueeze(-1)).sum(1)""",
    "einsum": """h = F.silu(torch.einsum('tkih,th->tki', self.w_in[ids], x))
@between
y = torch.einsum('tkhi,tki->tkh', self.w_out[ids], h)
out = torch.einsum('tkh,tk->th', y, w)""",
    "sorted": """perm = ids.flatten().argsort(stable=True)
token = perm // K
sizes = torch.bincount(ids.flatten(), minlength=E).tolist()
rows, weights = x[token], w.flatten()[perm]
@gathered
{start}
@before
start = 0
for e, n in enumerate(sizes):
    end = start + n
    tok = token[start:end]
    @inside
    y = {expert} * weights[start:end, None]
    {add}
    start = end
    @between""",
}

ROWS = {
    "rows": "x[tok]", "hits": "x[tok]", "dense": "x", "table": "x", "turned": "x", "turned back": "x", "masks": "x[mask]",
    "sorted": "rows[start:end]",
}  # fmt: skip
"""What an expert gets."""

TURNED = ("turned", "turned back", "by feature")
"""Sums with their features first: as many tokens as features fit both ways, so that shapes say nothing."""

SIZED = ("rows", "hits", "masks", "sorted")
"""What has sizes that depend on data: without capture, Dynamo breaks the graph there."""

UNROLLED = ("rows", "dense", "table", "turned", "turned back", "masks")
"""Where the number of an expert is Python's."""

LOOPED = ("inside", "given", "hidden", "made", "between")
"""Places in the loop over experts."""

SCOPE: dict[str, tuple[str, ...]] = {
    "entry": ("x",), "scored": ("x", "scores"), "routed": ("x", "scores", "w", "ids"), "tabled": ("x", "w", "ids", "weights"),
    "gathered": ("x", "w", "ids", "rows"), "before": ("x", "w", "ids", "out"), "inside": ("x", "w", "ids", "out"),
    "given": ("given",), "hidden": ("given", "h"), "made": ("h", "o"), "between": ("x", "w", "ids", "out"),
    "after": ("x", "scores", "w", "ids", "out"),
}  # fmt: skip
"""Tensors that a place knows, in the order of a program."""


_LINE = re.compile(r"^( *)y = \{expert\}", re.MULTILINE)


@dataclass(frozen=True)
class Spelling:
    """One way to write the layer."""

    body: str = "rows"
    route: str = "softmax"
    start: str = "zeros"
    expert: str = "modules"
    add: str = "index_add_"
    sum: str = "add"
    skip: str = ""
    own: str = ""
    checkpoint: bool = False

    @property
    def template(self) -> str:
        """The statements of ``forward``, with ``@place`` where effects may stand."""
        expert, body = EXPERTS[self.expert].format(ROWS.get(self.body, "")), BODIES[self.body]
        if self.expert == "open":
            body = _LINE.sub(lambda line: textwrap.indent(_OPEN.format(rows=ROWS[self.body]), line[1]) + line[0], body)
        names = {
            "start": STARTS[self.start],
            "skip": SKIPS.get(self.skip, ""),
            "expert": expert,
            "add": ADDS[self.add],
            "sum": SUMS[self.sum],
        }
        return f"{self.own}\n@entry\n{ROUTES[self.route]}\n@routed\n{body.format(**names)}\n@after\nreturn out"

    @property
    def places(self) -> list[str]:
        """Where effects may stand."""
        return [line.strip()[1:] for line in self.template.splitlines() if line.strip().startswith("@")]

    def knows(self, place: str) -> tuple[str, ...]:
        """The tensors with a name at a place."""
        made_by_loop = ("out",) if self.body in ("bmm", "einsum") and place in ("between", "inside") else ()
        return tuple(name for name in SCOPE[place] if name not in made_by_loop)

    def source(self, effects: dict[str, list[str]]) -> str:
        """``def forward(self, x)`` with statements at places."""
        lines = []
        for line in self.template.splitlines():
            lead, text = line[: len(line) - len(line.lstrip())], line.strip()
            if text.startswith("@"):
                lines += [lead + inner for statement in effects.get(text[1:], ()) for inner in statement.splitlines()]
            elif text:
                lines.append(line)
        body = textwrap.indent("\n".join(lines), "    ")
        if not self.checkpoint:
            return f"def forward(self, x):\n{body}\n"
        return f"def inner(self, x):\n{body}\n\ndef forward(self, x):\n    return checkpoint(self.inner, x, use_reentrant=False)\n"


def samples(name: str, tokens: int) -> Tensor:
    """A tensor that looks like the one that a program calls ``name``."""
    if name in STATE:
        return torch.rand(STATE[name], dtype=torch.float64).to(torch.long if name == "self.hits" else torch.float64)
    if name == "ids":
        return torch.rand(tokens, E).topk(K).indices
    if name == "rows":
        return torch.rand(tokens * K, H, dtype=torch.float64)
    shape = {"scores": (tokens, E), "w": (tokens, K), "weights": (tokens, E), "h": (tokens, I)}.get(name, (tokens, H))
    return torch.rand(shape, dtype=torch.float64)
