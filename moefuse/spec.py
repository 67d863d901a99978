"""The vocabulary of the project: what a mixture-of-experts region is, as frozen data.

Shape letters mean the same everywhere: T tokens, H hidden size, I expert intermediate size, E experts, K experts per token (top-k),
S = T*K routed slots.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Domain = Literal["selected", "masked", "slots", "sorted", "dense"]
Gating = Literal["merged", "interleaved", "split", "plain"]
Tier = Literal["fused", "grouped"]


def op_gating(gating: Gating) -> str:
    """The value of the ops' argument ``gating``: theirs, and that of measurements kept on disk, is ``"separate"`` for ``"split"``."""
    return "separate" if gating == "split" else gating


@dataclass(frozen=True)
class ExpertsSpec:
    """One layer's routed experts, as read from the graph (never from a config).

    Attributes:
        num_experts: E, the number of experts whose weights the region holds.
        top_k: K, routed slots per token.
        hidden: H, features of a token.
        intermediate: I, features between the two projections (0 when the body is not a two-projection expert).
        dtype: dtype of the expert weights, e.g. ``"bfloat16"``.
        activation: key of :data:`moefuse.ops.meaning.activations.ACTIVATIONS`, or ``"custom"`` for a body that no template describes.
        activation_args: constants of the activation, in the order given there (e.g. alpha and limit).
        gating: how gate and up projection are stored: ``"merged"`` (halves of one weight), ``"interleaved"``, ``"split"`` (two weights), or
            ``"plain"``, which has no gate.
        up_first: the activation is applied to the second half (or the odd features) of a merged projection.
        weights: ``"stacked"`` for one 3-D tensor per projection, ``"per_expert"`` for one 2-D Parameter per expert.
        layout: ``"out-in"`` when a projection is stored as ``nn.Linear`` stores it, ``"in-out"`` when transposed; (first, last) projection.
        bias: whether any projection has a bias.
        weight_on: whether the routing weight multiplies the expert's output or its input.
        hidden_out: features of the result; 0 stands for ``hidden``.
        compute: dtype that is computed in, where weights in float32 are rounded to it as they are read (autocast); empty for ``dtype``.
        lora: ranks of low-rank terms beside the projections, each once; empty without adapters.
        dropout: probabilities of the dropouts in front of them.
        encoding: how the weights are held, where that is in few bits; empty for weights in ``dtype``.
    """

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    dtype: str
    activation: str
    activation_args: tuple[float, ...] = ()
    gating: Gating = "merged"
    up_first: bool = False
    weights: Literal["stacked", "per_expert"] = "stacked"
    layout: tuple[str, str] = ("out-in", "out-in")
    bias: bool = False
    weight_on: Literal["output", "input"] = "output"
    hidden_out: int = 0
    compute: str = ""
    lora: tuple[int, ...] = ()
    dropout: tuple[float, ...] = ()
    encoding: str = ""

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return asdict(self)

    @property
    def dtypes(self) -> str:
        """The dtype of the weights, and the one that is computed in where that is another."""
        return f"{self.dtype} weights, computed in {self.compute}" if self.compute else self.dtype

    def __str__(self) -> str:
        sizes = f"E={self.num_experts} K={self.top_k} H={self.hidden} I={self.intermediate}"
        sizes += f" out={self.hidden_out}" if self.hidden_out not in (0, self.hidden) else ""
        act = self.activation + (f"{self.activation_args}" if self.activation_args else "")
        dtypes = f"{self.dtypes}," if self.compute else self.dtypes
        parts = [sizes, dtypes, act, f"gating={self.gating}", f"weights={self.weights}", "/".join(dict.fromkeys(self.layout))]
        parts += ["bias"] if self.bias else []
        parts += ["weight on input"] if self.weight_on == "input" else []
        parts += [f"LoRA r={','.join(map(str, self.lora))}"] if self.lora else []
        parts += [f"held as {self.encoding}"] if self.encoding else []
        parts += [f"dropout {','.join(map(str, self.dropout))}"] if self.dropout else []
        return " ".join(parts)
