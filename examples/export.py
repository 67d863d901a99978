"""Export a layer with torch.export, and compile it ahead of time: the package has the fused op in it.

python examples/export.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moefuse


class MoE(nn.Module):
    """Every expert on every token, times a weight that is 0 where it was not chosen: what people export."""

    def __init__(self, hidden: int = 64, width: int = 48, experts: int = 8, top_k: int = 2) -> None:
        super().__init__()
        self.router, self.top_k = nn.Linear(hidden, experts, bias=False), top_k
        self.up = nn.Parameter(torch.randn(experts, hidden, width) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(self.top_k)
        table = torch.zeros(x.shape[0], self.up.shape[0], dtype=x.dtype).scatter(1, ids, weights)
        out = torch.zeros_like(x)
        for e in range(self.up.shape[0]):
            out = out + F.silu(x @ self.up[e]) @ self.down[e] * table[:, e, None]
        return out


def main() -> None:
    torch.manual_seed(0)
    layer, x = MoE().eval(), torch.randn(32, 64)
    sizes = {"x": {0: torch.export.Dim("tokens", min=2, max=4096)}}
    program = torch.export.export(layer, (x,), dynamic_shapes=sizes)

    # One process may run the exported program ..
    compiled = torch.compile(program.module(), backend="moefuse", options={"expect": 1})
    with torch.no_grad():
        print(f"compiled: differs by at most {(compiled(x) - layer(x)).abs().max().item():.1e}")

    # .. or Inductor writes a package for others, which import moefuse and no model.
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = str(Path(folder) / "layer.pt2")
        torch._inductor.aoti_compile_and_package(
            program, package_path=path, inductor_configs={"pre_grad_custom_pass": moefuse.MoEFusionPass()}
        )
        package = torch._inductor.aoti_load_package(path)
        for tokens in (32, 7):
            other = torch.randn(tokens, 64)
            print(f"package, {tokens} tokens: differs by at most {(package(other) - layer(other)).abs().max().item():.1e}")
    print(moefuse.last_report())


if __name__ == "__main__":
    main()
