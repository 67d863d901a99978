"""Programs that were wrong once, written as the generator writes them: a statement went with the loop, or was not seen as a write.

Where the proof would catch it, it is off: the facts have to see it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.programs.effects.layers import H, Spelling
from tests.programs.effects.program import CALLER, Effect, Program

NEUTRAL, COLUMN = (5, 5), (H, H)
"""Tokens of two calls, between which parameters change; as many as fit a table of two columns, too."""


@dataclass(frozen=True)
class Found:
    """``fused``: how many layers are; ``codes``: of those that are not. ``behind``: which of torch's compilers."""

    program: Program
    fused: int = 1
    codes: tuple[str, ...] = ()
    behind: str = "eager"


def found(
    body: str,
    *statements: tuple[str, str],
    fused: int | None = None,
    codes: tuple[str, ...] = (),
    behind: str = "eager",
    grad: bool = True,
    verify: str = "off",
    twins: bool = False,
    tokens: tuple[int, ...] = NEUTRAL,
    **spelling: Any,
) -> Found:
    effects = tuple(Effect("written by hand", (statement,)) for statement in statements)
    program = Program(Spelling(body, **spelling), effects, twins=twins, grad=grad, verify=verify, tokens=tokens)
    return Found(program, int(not codes) if fused is None else fused, codes, behind)


def _tables() -> dict[str, Found]:
    """Every expert takes part a little: the table of weights is clamped in place, through something that shares its memory."""
    views = (
        "weights.data", "torch.atleast_2d(weights).cpu()", "torch.as_strided(weights, weights.shape, weights.stride())",
        "weights.hsplit(1)[0]", "torch.positive(weights)", "torch.broadcast_to(weights, weights.shape)", "torch.as_tensor(weights)",
    )  # fmt: skip
    alone = ("routed", "w = w.detach()")
    rows = {
        f"a table through {view}": found("table", alone, ("tabled", f"{view}.clamp_(min=0.05)"), codes=("not-recognised",))
        for view in views
    }
    return rows | {
        "a table through its data, with its gradient": found(
            "table", ("tabled", "weights.data.clamp_(min=0.05)"), codes=("not-recognised",)
        )
    }


def _behind_a_break(shown: str) -> tuple[str, str]:
    """Of views torch keeps no version counter there, so that gradients were wrong; of others it raised."""
    return "after", f"torch._dynamo.graph_break()\nwith torch.no_grad():\n    {shown}.mul_(0.5)"


def _neutral_at_first() -> dict[str, Found]:
    """Nothing shows while the program is compiled."""
    adapter = ("before", "out.add_(x @ self.A @ self.B)")
    return {
        "an adapter that is zero at first": found("rows", adapter, verify="probe"),
        "a scale that is one at first": found("dense", ("before", "out.mul_(self.scale)"), start="clone", verify="probe"),
        "an equal layer that adds nothing": found("rows", ("before", "out.add_(self.shift)"), fused=2, twins=True, verify="probe"),
    }


def _through_data() -> dict[str, Found]:
    count = "c = torch.bincount(ids.flatten(), minlength=E).to(x.dtype)\n"
    balanced = (
        count + "self.bias.data.add_(0.01 * torch.sign(c.mean() - c))\nself.ema.data.mul_(0.9).add_(c, alpha=0.1)\nself.load.data[:] = c"
    )
    normed = "self.gate.weight.data.copy_(F.normalize(self.gate.weight.data, dim=-1))"
    clipped = "for expert in self.experts: expert.up.weight.data.clamp_(-0.05, 0.05)"
    return {
        "what the next expert gets is less": found("rows", ("between", "x.data.mul_(0.9)"), own="x = x * 1", codes=("mutation",)),
        "only two experts are left": found("rows", ("routed", "ids.data.clamp_(max=1)"), add="iadd", codes=("ids-not-distinct",)),
        "weights are clipped behind their use": found(
            "rows", ("between", "self.experts[e].up.weight.data.clamp_(-0.1, 0.1)"), codes=("mutation",)
        ),
        "balancing without a loss": found("rows", ("routed", balanced), route="biased", skip="numel"),
        "rows of the router are normalised": found("rows", ("entry", normed), ("entry", clipped), skip="numel"),
        "a view by an operator of TorchScript": found(
            "rows", ("routed", "torch.ops.aten._ncf_view.default(ids.t(), [-1], 0).clamp_(max=1)")
        ),
    }


def _weights_behind() -> dict[str, Found]:
    """Autograd saved the table, so that eager may change the weights afterwards. An op that was given the weights has saved those."""
    logged = (("tabled", "self.kept = w.detach().clone()"), (CALLER, "kept.zero_()"))
    return {
        "written behind the experts": found("table", ("after", "w.mul_(0.5)"), codes=("mutation",)),
        "written by a list": found("table", ("after", "torch._foreach_mul_([w], 0.5)"), codes=("mutation",)),
        "behind a break, a slice": found("table", _behind_a_break("w"), route="sorted", behind="aot_eager"),
        "behind a break, masks": found("dense", _behind_a_break("w"), behind="aot_eager"),
        "behind a break, through a view": found("table", _behind_a_break("w.narrow(1, 0, 1)"), route="sorted", behind="aot_eager"),
        "behind a break, compiled": found("table", _behind_a_break("w"), behind="inductor"),
        # Inductor takes the copy away, and autograd found the weights changed that the op keeps.
        "a copy that the caller clears": found("table", *logged, behind="inductor"),
    }


def _cut_sums() -> dict[str, Found]:
    """Experts in front of the statement and behind it are sums of their own, which read some columns of the table that all share."""
    return {
        f"a sum cut at {e}, {verify}": found(
            "table", ("inside", f"if e == {e}: out.addmm_(x @ self.A, self.B)"), verify=verify, tokens=COLUMN
        )
        for e, verify in ((2, "off"), (2, "probe"))
    }


def _between_layers() -> dict[str, Found]:
    """The first layer's sum is changed through a view before the second one reads it; dead code of captured loops goes."""
    writes = {"all": "x.data.mul_(2)", "some": "x.data.view(-1)[3:].zero_()", "a row": "x.data.unbind(0)[1].add_(1)"}
    end = ("after", "out.detach().mul_(2)")
    return {
        f"a sum through a view, {name}, {verify}": found("hits", ("entry", write), end, fused=2, twins=True, grad=False, verify=verify)
        for name, write in writes.items()
        for verify in ("off", "probe")
    }


def _operators() -> dict[str, Found]:
    """Operators of the user's own: only their schema says to what they write."""
    ops, refused = "torch.ops.moefuse_effects", {"codes": ("mutation",), "own": "x = x * 1", "grad": False}
    return {
        "an operator writes to the tokens": found("dense", ("inside", f"if e == 1: {ops}.scale(x, 2.0)"), **refused),
        "by position": found("dense", ("inside", f"if e == 1: {ops}.swap(torch.zeros_like(x), x)"), **refused),
        "by name": found("dense", ("inside", f"if e == 1: {ops}.swap(second=torch.ones_like(x), first=x)"), **refused),
        "to another tensor": found(
            "dense", ("entry", "t = x * 2"), ("inside", f"if e == 1: {ops}.scale(t, 2.0)"), ("after", "out = out + t"), grad=False
        ),
        "to a copy of the tokens": found("dense", ("inside", f"if e == 1: {ops}.swap(x.clone(), x * 2)"), grad=False),
        "before the experts": found("dense", ("entry", f"t = x * 3\n{ops}.swap(x, t)\nx = x - 0.5 * t"), own="x = x * 1", grad=False),
    }


def _out() -> dict[str, Found]:
    """``out=`` writes to a tensor that is not the first argument."""
    own = ("routed", "w = w.clone()")
    return {
        "out= are weights": found("rows", own, ("inside", "if e == 1: torch.add(torch.ones_like(w), 1.0, out=w)"), fused=0, grad=False),
        "out= are tokens": found("rows", ("inside", "if e == 1: torch.zeros(x.shape, out=x)"), fused=0, grad=False, own="x = x.clone()"),
        "out= are ids": found("rows", ("inside", "if e == 1: torch.zeros(ids.shape, dtype=ids.dtype, out=ids)"), fused=0, grad=False),
        "out= is the sum": found("rows", ("inside", "if e == 1: torch.ones(x.shape, out=out)"), fused=0, grad=False),
        "out= are weights afterwards": found("rows", own, ("after", "torch.ones(w.shape, out=w)\nout = out * w.sum()"), grad=False),
    }


def _tokens() -> dict[str, Found]:
    """Tokens that are written in place in front of the experts (jitter), and read by any of their names."""
    base = "base = (x + 1.0).view(-1, 1, H)\nbase *= 0.9\nt = base.reshape(-1, H)\n"
    back, twice = ("after", "out = out + base.view(-1, H)"), "t.mul_(0.8)\n"
    other = ("inside", "x = r if e == 1 else t")
    return {
        "tokens by the result": found("rows", ("entry", base + "x = t.mul_(0.9)"), back),
        "tokens by what was written to": found("rows", ("entry", base + twice + "t.mul_(0.9)\nx = t"), back),
        "tokens by what that is a view of": found("rows", ("entry", base + twice + "t.mul_(0.9)\nx = base.view(-1, H)"), back),
        "tokens by two names": found("rows", ("entry", base + "r = t.mul_(0.9)\nx = t"), other, back, codes=("experts-differ",)),
        "tokens between experts": found(
            "rows", ("entry", "x = x + 1"), ("inside", "if e == 1: x.mul_(0.9)"), codes=("mutation",), grad=False
        ),
    }


def _ids() -> dict[str, Found]:
    """``out[tok] +=`` adds one of a token's slots, and takes any."""
    return {"ids through bool": found("rows", ("routed", "ids = ids.bool().long()"), add="iadd", codes=("tokens-differ",))}


def _strides() -> dict[str, Found]:
    """Tokens whose rows are not one behind the other: a program may read a result's strides, and views depend on them."""
    columns, gaps = "x = x.t().contiguous().t()", "x = torch.stack((x, x), -1).flatten(1)[:, ::2]"
    flat = "out = out.t().view(-1) if out.stride(0) == 1 else out.view(-1)"
    raw = "out = out.as_strided((out.numel(),), (1,))"
    rows = {
        f"columns, {name}, {read or 'as they are'}": found(body, ("entry", columns), *([("after", read)] if read else []), sum=add)
        for name, body, add in (("selected", "rows", "add"), ("masked", "dense", "add"), ("masked in place", "dense", "iadd"))
        for read in ("", flat, raw)
    }
    compiled = found("dense", ("entry", columns), ("after", raw), behind="inductor")
    return rows | {
        "columns, compiled": compiled,
        "columns, compiled for any number": replace(compiled, program=replace(compiled.program, dynamic=True, tokens=(5, 7))),
        "rows with gaps": found("dense", ("entry", gaps)),
        "columns, one token": found("rows", ("entry", columns), tokens=(1, 1)),
    }


FOUND: dict[str, Found] = {
    **_tables(), **_neutral_at_first(), **_through_data(), **_weights_behind(), **_cut_sums(), **_between_layers(), **_operators(),
    **_out(), **_tokens(), **_ids(), **_strides(),
}  # fmt: skip
"""By name."""
