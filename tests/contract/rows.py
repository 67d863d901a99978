"""The calls of the contract, as data: each says why it is there. Who runs a row, in which dtypes and at which sizes: ``providers.py``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moefuse.ops import experts_reference
from tests.cpu.coded_case import ENCODINGS, coded
from tests.cpu.ops_case import GATED, Case, every_body

SCALES = [2.0, 0.5, -1.5]
GATINGS = (*GATED, "plain")
STORAGES: dict[str, dict[str, bool]] = {"stacked": {}, "in-out": {"transposed": True}, "separate": {"separate": True}}
X, IDS, WEIGHTS, FACTORS, CODES = 0, 1, 2, slice(9, 15), 15


@dataclass
class Drawn:
    """The tensors of one call: ``run`` is the op, ``meaning`` its definition, which takes the same in float64, too.

    ``places`` are the arguments that have gradients.
    """

    args: list[Any]
    run: Callable[[list[Any]], Tensor]
    meaning: Callable[[list[Any]], Tensor]
    places: tuple[int, ...]
    call: tuple[Any, dict[str, Any]] = (None, {})
    """The op and its options, for ``opcheck``."""
    dtype: torch.dtype = torch.float32
    """The one that is computed in."""
    plain: Sequence[Any] = ()
    """The arguments of ``experts`` with the weights that codes mean."""

    def leaves(self, args: list[Any] | None = None) -> list[Tensor]:
        """What has a gradient, of ``args`` or of the call."""
        given = self.args if args is None else args
        return [t for i in self.places for t in (given[i] if isinstance(given[i], list) else [given[i]])]

    def copied(self, dtype: torch.dtype | None = None, grad: bool = False) -> list[Any]:
        """The same values in new tensors of the same strides, those with gradients in ``dtype``; ``grad``: they want them."""

        def copy(t: Any, leaf: bool) -> Any:
            if not isinstance(t, Tensor):
                return t
            own = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) if without_gaps(t) else t
            own = own.to(dtype) if leaf and dtype is not None else own
            return own.detach().requires_grad_() if leaf and grad else own.detach()

        leaf = [i in self.places for i in range(len(self.args))]
        return [[copy(t, leaf[i]) for t in a] if isinstance(a, list) else copy(a, leaf[i]) for i, a in enumerate(self.args)]


def without_gaps(t: Tensor) -> bool:
    """A tensor without gaps, of which nothing is there twice."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(t))


@dataclass(frozen=True)
class Row:
    """A call of ``experts`` or ``experts_extended``. ``case`` are fields of :class:`Case`, which go before the sizes of who runs it.

    ``rank``: of low-rank terms, in the dtype ``factors``. ``encodings``: names of :data:`ENCODINGS` for the three projections.
    ``change``: of the tensors, once they are drawn.
    """

    name: str
    why: str
    case: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0
    factors: torch.dtype | None = None
    encodings: tuple[str, ...] = ()
    recompute: bool = False
    change: Callable[[list[Any]], None] | None = None

    @property
    def op(self) -> str:
        """The kind of call, which providers name."""
        return {(0, 0): "experts", (1, 0): "terms", (0, 1): "codes", (1, 1): "codes and terms"}[bool(self.rank), bool(self.encodings)]

    def drawn(self, by: Any, dtype: torch.dtype, **more: Any) -> Drawn:
        """The call at the sizes of who runs it, on its device; ``more``: fields of :class:`Case` that go before all others."""
        given, device = {**by.sizes, **self.case, **more}, by.device
        if self.encodings:
            given |= {name: -(-given.get(name, 32) // 32) * 32 for name in ("hidden", "inter", "hidden_out")}
        case = Case(**given, dtype=dtype)
        args, dense, options = coded(case, *(by.encoding(n) if n else None for n in self.encodings or ("", "", "")), in_out=case.transposed)
        if self.rank:
            args[FACTORS] = self._terms(case, dense)
        if self.change is not None:
            self.change(args)
        args = [[t.to(device) for t in a] if isinstance(a, list) else a.to(device) for a in args]
        held = {i: [t.to(device) for t in dense[i]] for i, text in enumerate(options["encodings"], 3) if text}
        op, options = self._op(options)
        count = 9 if self.op == "experts" else 16

        def run(given: list[Any]) -> Tensor:
            out: Tensor = op(*given[:count], **options)
            return out

        def meaning(given: list[Any]) -> Tensor:
            parts = [held[i] if i in held else given[i] for i in (3, 4, 5)]
            whole = [merged([t.to(given[0].dtype) for t in w] if i + 3 in held else w, given, i) for i, w in enumerate(parts)]
            wide = given[0].dtype != dtype
            return experts_reference(*given[:3], *whole, *given[6:9], **{**case.options, "out_dtype": None if wide else case.out_dtype})

        places = (X, WEIGHTS, *(() if held else (3, 4, 5)), 6, 7, 8, *range(9, 15))
        places = tuple(i for i in places if i < count)
        return Drawn(args[:count], run, meaning, places, (op, options), dtype, [held.get(i, a) for i, a in enumerate(args[:9])])

    def _op(self, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self.op != "experts":
            return torch.ops.moefuse.experts_extended, {**options, "scales": SCALES if self.rank else [], "recompute": self.recompute}
        del options["encodings"]
        return torch.ops.moefuse.recomputed_experts if self.recompute else torch.ops.moefuse.experts, options

    def _terms(self, case: Case, given: list[Any]) -> list[list[Tensor]]:
        g = torch.Generator().manual_seed(case.seed + 3)
        found: list[list[Tensor]] = []
        for w in given[3:6]:
            for shape in ((self.rank, w[0].shape[-1]), (w[0].shape[-2], self.rank)) if w else ((), ()):
                t = torch.randn(case.experts, *shape, generator=g, dtype=torch.float64) / (shape[-1] if shape else 1) ** 0.5
                t = t.to(self.factors or case.dtype)
                found.append(([v.clone() for v in t] if case.separate else [t]) if shape else [])
        return found


def merged(weights: list[Tensor], given: list[Any], which: int) -> list[Tensor]:
    """The weights of a projection with its low-rank terms added."""
    a, b = (given[9 + 2 * which], given[10 + 2 * which]) if len(given) > 9 else ([], [])
    if not a:
        return weights
    return [(w + SCALES[which] * (v @ u).to(w.dtype)) for w, u, v in zip(weights, a, b, strict=True)]


BODIES = [
    Row(
        f"{c.activation}-{c.gating}{'-up-first' * c.up_first}-{where}",
        "every activation, gating and order of halves; routing weights in front of the experts and behind them",
        {"activation": c.activation, "gating": c.gating, "up_first": c.up_first, "weight_on_input": where == "input"},
    )
    for c, where in itertools.product(every_body(), ("output", "input"))
]

STORED = [
    Row(
        f"{gating}-{storage}-{where}{'' if bias else '-no-bias'}",
        "weights are read where they lie: in one tensor or many, stored out-in or in-out, with biases and without",
        {"gating": gating, "weight_on_input": where == "input", "bias": bias, **STORAGES[storage]},
    )
    for gating, storage, where, bias in itertools.product(GATINGS, STORAGES, ("output", "input"), (True, False))
]

EDGES = [
    Row("no-tokens", "nothing to do, and gradients are zeros", {"tokens": 0}),
    Row("one-token", "the smallest decode step", {"tokens": 1}),
    Row("one-slot", "one row at all", {"tokens": 1, "top_k": 1}),
    Row("two-tokens", "fewer rows than any vector", {"tokens": 2}),
    Row("three-tokens", "an odd number of them", {"tokens": 3}),
    Row("one-expert", "no choice", {"experts": 1, "top_k": 1, "high_id": 1}),
    Row("every-expert", "no expert without rows", {"experts": 4, "top_k": 4}),
    Row("top-1", "sums of one", {"top_k": 1}),
    Row("hidden-1", "sums of one input", {"hidden": 1}),
    Row("inter-1", "sums of one hidden feature", {"inter": 1}),
    Row("odd", "no size is a multiple of anything", {"tokens": 17, "hidden": 13, "inter": 7, "experts": 5, "top_k": 3, "hidden_out": 11}),
    Row("mostly-empty", "far more experts than slots", {"tokens": 3, "experts": 64, "top_k": 6}),
    Row("one-expert-twice", "a token chooses one expert in each slot", {"low_id": 1, "high_id": 2}),
    Row("one-expert-all-rows", "one expert has every row", {"tokens": 20, "low_id": 0, "high_id": 1}),
    Row("no-valid-id", "no slot is anybody's", {"low_id": -3, "high_id": 0}),
    Row("ids-behind-the-last", "ids from E on are nobody's", {"experts": 3, "low_id": 3, "high_id": 6}),
    Row("some-bias", "only the first projection has one", change=lambda args: args.__setitem__(8, [])),
    Row("other-bias", "only the last projection has one", change=lambda args: args.__setitem__(6, [])),
    Row("mixed-lists", "one stacked, one a tensor for each expert", change=lambda args: args.__setitem__(3, list(args[3][0].unbind(0)))),
    Row("empty-and-term", "a call without slots has gradients of factors, too", {"tokens": 0}, rank=3),
    Row("nobody-and-term", "no slot is anybody's", {"low_id": -3, "high_id": 0}, rank=3),
    Row("empty-and-codes", "no rows of packed weights", {"tokens": 0}, encodings=("fp8 blocks", "", "nibbles")),
    Row("one-and-codes", "one row of packed weights", {"tokens": 1}, encodings=("nibbles", "", "int8 channels")),
    Row("nobody-and-codes", "no slot is anybody's", {"low_id": -3, "high_id": 0}, encodings=("nibbles", "", "int8 channels")),
]
MANY = [
    Row("sorted-by-torch", "more slots than are sorted one by one", {"tokens": 97}),
    Row("several-chunks", "an expert's rows in several pieces", {"tokens": 600, "experts": 4}),
    Row("several-chunks-separate", "the same with a tensor for each expert", {"tokens": 600, "experts": 4, "separate": True}),
    Row("wide", "sums of one slot at a time", {"tokens": 300, "hidden": 160, "hidden_out": 160}),
    Row("crowded", "one expert has half of all rows", {"tokens": 900, "experts": 12, "top_k": 2, "low_id": 0, "high_id": 12},
        change=lambda args: args[IDS][:, 0].fill_(3)),
    Row("no-valid-id", "no slot of many is anybody's", {"tokens": 70, "experts": 3, "low_id": 3, "high_id": 6}),
    Row("codes", "tiles of several rows of packed weights", {"tokens": 300}, encodings=("fp8 blocks", "", "fp8 blocks")),
]  # fmt: skip


def _experts_last(args: list[Any]) -> None:
    for i in (10, 14):
        args[i] = [t.permute(1, 2, 0).contiguous().permute(2, 0, 1) for t in args[i]]


def _only(which: int) -> Callable[[list[Any]], None]:
    def change(args: list[Any]) -> None:
        args[FACTORS] = [part if i // 2 == which else [] for i, part in enumerate(args[FACTORS])]

    return change


TERMS = [
    *(
        Row(f"{gating}-{storage}-{where}", "a term beside each projection, in every form of the experts",
            {"gating": gating, "weight_on_input": where == "input", **STORAGES[storage]}, rank=3)
        for gating, storage, where in itertools.product(GATINGS, ("stacked", "separate"), ("output", "input"))
    ),
    Row("up-first", "the factor has the order of the weight's rows", {"up_first": True}, rank=3),
    Row("inputs-slowest", "weights that are stored in-out beside their terms", STORAGES["in-out"], rank=3),
    Row("experts-fastest", "B of PEFT's stacked experts is [out, r, E] in memory", rank=3, change=_experts_last),
    *(Row(f"only-{i}", "the other projections have none", {"gating": "separate"}, rank=3, change=_only(i)) for i in range(3)),
    *(Row(f"rank-{rank}", "one, a whole block, several, and more than the inner size", rank=rank) for rank in (1, 16, 20, 70)),
    Row("recomputed", "h is computed again in backward", rank=3, recompute=True),
]  # fmt: skip

CODED = [
    *(
        Row(f"{name}-{storage}", "each kind of encoding that libraries have", STORAGES[storage], encodings=(name, "", name))
        for name, storage in itertools.product(ENCODINGS, STORAGES)
    ),
    *(
        Row(f"{gating}-{where}-{'+'.join(n or 'plain' for n in names)}",
            "codes of the up projection stand between the others'; one projection may be in floating point",
            {"gating": gating, "activation": "relu2" if gating == "plain" else "silu", "weight_on_input": where == "input"},
            encodings=names)
        for gating, where in itertools.product(GATINGS, ("output", "input"))
        for names in (("fp8 blocks", "nibbles, zeros" if gating == "separate" else "", ""), ("", "", "int8 channels"))
    ),
    Row("recomputed", "h is computed again in backward", encodings=("fp8 blocks", "", "nibbles"), recompute=True),
]  # fmt: skip

BOTH = [
    Row(f"{gating}-{where}", "terms beside projections in few bits",
        {"gating": gating, "activation": "relu2" if gating == "plain" else "silu", "weight_on_input": where == "input",
         "separate": where == "input"},
        rank=3, encodings=("fp8 blocks", "nibbles, zeros" if gating == "separate" else "", "int8 channels"), recompute=where == "input")
    for gating, where in itertools.product(GATINGS, ("output", "input"))
]  # fmt: skip
SIZES = [
    Row(name, "what a GPU cuts otherwise: rows of every number, whole 16 bytes and not, more slots than one sort takes", dict(zip(
        ("tokens", "hidden", "inter", "hidden_out", "experts", "top_k"), sizes, strict=True)))
    for name, sizes in {
        "few": (3, 96, 64, 80, 9, 2), "some": (70, 96, 64, 96, 9, 4), "many": (1500, 136, 200, 264, 6, 2), "odd": (70, 51, 37, 45, 5, 3),
        "sorted": (5000, 64, 32, 64, 20, 2), "wide": (3000, 512, 384, 512, 8, 4), "eights": (700, 136, 72, 200, 9, 2),
    }.items()
]  # fmt: skip
