"""Expert loops written by a generator: as many ways to say the same as its parts allow, and one thing wrong in each near miss.

A :class:`Loop` is turned into Python source, so that Dynamo sees what it would see of a user's file. ``twist`` names the one statement that
makes a difference; ``"none"`` is a mixture of experts and must be fused.
"""

from __future__ import annotations

import itertools
import linecache
import textwrap
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tests.programs.loops.base import E, H, K, Layer

_numbers = itertools.count()

OVER = {
    "range": "range(E)",
    "nonzero": "hit.nonzero()",
    "flat": "hit.nonzero().flatten()",
    "list": "hit.nonzero().flatten().tolist()",
    "where": "torch.where(hit)[0]",
    "unique": "ids.unique()",
    "unique_list": "torch.unique(ids.flatten()).tolist()",
}
"""What the loop runs over."""

IDS = {
    "topk": "",
    "minus_one": "ids = ids - 1",
    "minus_all": "ids = ids - E",
    "twice": "ids = ids * 2 - 1",
    "table": "ids = torch.tensor([-1, 3, 0, E])[ids]",
    "dropped": "ids = ids.masked_fill(weights < 0.5, -1)",
    "sentinel": "ids = ids.masked_fill(weights < 0.5, E)",
    "in_place": "ids[weights < 0.5] = -1",
    "where": "ids = torch.where(weights < 0.5, ids - E, ids)",
    "remainder": "ids = (ids + 3).remainder(E)",
    "modulo": "ids = (ids * 3 - 1) % E",
    "clamped": "ids = (ids * 2 - 1).clamp(0, E - 1)",
    "bool": "ids = ids.bool().long()",
    "uint8": "ids = (ids - 1).to(torch.uint8).long()",
    "int32": "ids = ids.int()",
    "half": "ids = (ids - 1).half().long()",
}
"""What becomes of the ids of the top-k: below zero, too high, twice the same, or as good as before."""

WITHIN = ("topk", "remainder", "modulo", "clamped", "bool", "int32")
"""Those that are ids of experts, whatever the logits."""

MASKS = {
    "one_hot": ("mask = F.one_hot(ids, num_classes=E).permute(2, 1, 0)", "mask[e]", True),
    "padded": ("mask = F.one_hot(ids, E + 1)[..., :E].permute(2, 1, 0)", "mask[e]", True),
    "equal": ("", "ids == e", False),
    "float": ("numbers = ids.float()", "numbers == e", False),
    "byte": ("", "ids.to(torch.uint8) == e", False),
    "equal_all": ("mask = ids[..., None] == torch.arange(E)", "mask[..., e]", False),
    "weighed": ("", "(ids == e) & (weights > 0)", False),
    "entries": ("mask = F.one_hot(ids, E).to(weights.dtype) * weights[..., None]", "mask[:, :, e]", False),
    "entries_first": ("mask = F.one_hot(ids, E).bool().permute(2, 0, 1) * weights", "mask[e]", False),
}
"""Once before the loop; the mask of one expert; whether its rows are slots."""

HITS = {
    "sum": "F.one_hot(ids, num_classes=E).sum(dim=(0, 1)) > 0",
    "any": "(ids[..., None] == torch.arange(E)).any(dim=1).any(dim=0)",
    "count": "F.one_hot(ids.flatten(), num_classes=E).sum(0).ne(0)",
}

IDLE = "out[0, 0] += 0 * sum(w.sum() for w in self.experts[e].parameters())"
"""What touches experts without tokens, for their gradients' sake."""

SKIPS = {
    "no": "",
    "numel": "if tok.numel() == 0: continue",
    "len": "if len(tok) < 1: continue",
    "shape": "if not tok.shape[0] > 0: continue",
    "any": "if not (ids == e).any(): continue",
}

GATHERS = {
    "index": "x[tok]",
    "counted": "x[tok].view(len(tok), -1)",
    "select": "x.index_select(0, tok)",
    "none": "x[None, tok].reshape(-1, H)",
}

OF_WEIGHTS = ("weighed", "entries", "entries_first")
"""Masks that say whose weight is not zero."""

WEIGHS = {
    "pair": ("", "weights[tok, slot, None]"),
    "entries": ("table = F.one_hot(ids, E).to(weights.dtype) * weights[..., None]", "table[tok, slot, e, None]"),
    "gather": ("", "weights[tok].gather(1, slot[:, None])"),
    "summed": ("", "(weights[tok] * (ids[tok] == e)).sum(-1, keepdim=True)"),
    "expanded": ("", "weights[tok, slot].unsqueeze(-1).expand(-1, H)"),
    "repeated": ("", "weights[tok, slot, None].repeat(1, H)"),
    "turned": ("turned = weights.t()", "turned[slot, tok, None]"),
}
"""Once before the loop; the weights of an expert's rows."""

BETWEEN = {
    "none": "",
    "assert": 'assert ids.shape[-1] == K, f"{ids.shape[-1]} experts for a token"',
    "about_data": 'assert torch.isfinite(weights).all(), f"weights of {tuple(weights.shape)}"',
    "print": 'if x.shape[0] > 1000: print(f"{x.shape[0]} tokens")',
}
"""What stands between the router and the experts."""

COUNTERS = {"none": "", "buffer": "self.total[e] += h_count"}
"""What a loop counts beside the experts."""

ADDS = {
    "index_add_": "out.index_add_(0, tok, y)",
    "iadd": "out[tok] += y",
    "index_add": "out = out.index_add(0, tok, y)",
    "index_put_": "out.index_put_((tok,), y, accumulate=True)",
}

INITS = {
    "zeros_like": "torch.zeros_like(x)",
    "leaf": "torch.zeros_like(x, requires_grad=True)",
    "turned": "x.new_zeros(x.shape).requires_grad_()",
    "of_a_leaf": "torch.zeros(x.shape, dtype=x.dtype, requires_grad=True).clone()",
}
"""What the sum begins with; eager lets nobody write to a leaf."""

REBINDS = {
    "none": "",
    "to": "out = out.to(y.dtype)",
    "type_as": "out = out.type_as(y)",
    "float": "out = out.float()",
    "contiguous": "out = out.contiguous()",
    "clone": "out = out.clone()",
    "view_as": "out = out.view_as(x)",
}
"""The sum is bound again in the loop, by what changes nothing."""

LAID = {"own": "x = x.clone()", "turned": "x = x.t().clone(memory_format=torch.contiguous_format).t()"}
"""How tokens lie in memory: a row after another, or a feature after another, as the patches of one image do."""

CONTEXTS = {
    "none": "",
    "inference_mode": "with torch.inference_mode(False):",
    "autocast": 'with torch.autocast("cpu", enabled=False):',
    "grad": "with torch.set_grad_enabled(torch.is_grad_enabled()):",
    "enable_grad": "with torch.enable_grad():",
}
"""What stands around an expert or around the loop, and changes nothing where gradients are recorded."""

LEAVES = ("leaf", "turned")

COUNTS = {
    "one_hot": "F.one_hot(ids.flatten(), num_classes=E).sum(0)",
    "padded": "F.one_hot(ids.flatten(), E + 1).sum(0)[:E]",
    "bincount": "torch.bincount(ids.flatten(), minlength=E)",
    "scatter": "ids.new_zeros((ids.shape[0], E)).scatter_(1, ids, 1).sum(0)",
    "histc": "torch.histc(ids.flatten().float(), bins=E, min=0, max=E - 1).long()",
    "compare": "(ids.view(-1, 1) == torch.arange(E)).sum(0)",
    "sorted": "torch.bincount(ids.flatten().sort()[0], minlength=E)",
    "cast": "torch.bincount(ids.int().view(-1), minlength=E)",
    "stacked": "torch.stack([(ids == i).sum() for i in range(E)])",
}

CUTS = {
    "list": ("sizes = counts.tolist()", "for e, n in enumerate(sizes):", "end = start + n", "start = end"),
    "tensor": ("", "for e, n in enumerate(counts):", "end = start + n", "start = end"),
    "numpy": ("sizes = counts.cpu().numpy()", "for e, n in enumerate(sizes):", "end = start + n", "start = end"),
    "ends": (
        "ends = counts.cumsum(0).tolist()",
        "for e, end in enumerate(ends):",
        "start = 0 if e == 0 else ends[e - 1]\nn = end - start",
        "",
    ),
    "bounds": (
        "ends = torch.cat((torch.zeros(1, dtype=torch.long), counts.cumsum(0)))",
        "for e in range(E):",
        "start, end = ends[e], ends[e + 1]\nn = end - start",
        "",
    ),
    "iadd": ("sizes = counts.tolist()", "for e, n in enumerate(sizes):", "end = start + n", "start += n"),
    "raised": ("sizes = counts.tolist()\nnext = 0", "for e, n in enumerate(sizes):", "start, end = next, next + n\nnext = end", ""),
    "occurring": (
        "found, numbers = torch.unique(ids, return_counts=True)\nexperts = found.tolist()",
        "for e, n in zip(experts, numbers.tolist()):",
        "end = start + n",
        "start = end",
    ),
    "occurring_ends": (
        "found, numbers = ids.flatten().sort()[0].unique_consecutive(return_counts=True)",
        "for e, end in zip(found.tolist(), numbers.cumsum(0).tolist()):",
        "n = end - start",
        "start = end",
    ),
}
"""Before the loop; its head; where an expert's slots begin and end; what the next expert needs."""

ORDERS = {
    "argsort": "perm = ids.flatten().argsort(stable=True)\ntoken = perm // K\nrows = x[token]\nscale = weights.flatten()[perm]",
    "map": (
        "gates = x.new_zeros(len(x), E)\nexpert, token = torch.where(gates.scatter(1, ids, 1.0).bool().T)\n"
        "rows = x[token]\nscale = gates.scatter(1, ids, weights.to(x.dtype))[token, expert]"
    ),
    "map_counted": (
        "gates = x.new_zeros(len(x), E)\nexpert, token = torch.where(gates.scatter(1, ids, 1.0).bool().T)\n"
        "counts = torch.bincount(expert, minlength=E)\n"
        "rows = x[token]\nscale = gates.scatter(1, ids, weights.to(x.dtype))[token, expert]"
    ),
    "lists": (
        "found = [torch.where(ids == e) for e in range(E)]\ntoken = torch.cat([f[0] for f in found])\n"
        "slot = torch.cat([f[1] for f in found])\nrows = x[token]\nscale = weights[token, slot]"
    ),
}
"""How slots come to stand expert by expert."""

CUT_SKIPS = {"no": "", "zero": "if n == 0: continue", "some": "if not n > 0: continue"}

ROWS = {"rows": "rows[start:end]", "tokens": "x[token[start:end]]", "slots": "x[perm[start:end] // K]"}

STORES = {"stacked": "self.expert(e, h)", "modules": "self.experts[e](h)", "parts": "self.in_parts(e, h)"}

# Twists by the part of the program that they change: (part, what stands there now). ``{}`` is what stood there.
TWISTS: dict[str, dict[str, str]] = {
    "none": {},
    "not_renormalised": {"route": "{}\nweights = logits.softmax(-1).gather(1, ids)"},
    "counts_iterations": {"before": "{}\nturns = 0", "after": "turns = turns + 1\n{}", "end": "out = out / (turns + 1)\n{}"},
    "counts_on_self": {"after": "self.calls += 1\n{}"},
    "remembers": {"after": "self.seen.append(1)\n{}"},
    "breaks_early": {"before": "{}\nturns = 0", "after": "{}\nturns = turns + 1\nif turns >= 2: break"},
    "breaks_when_empty": {"skip": "if h_count == 0: break"},
    "drops_small": {"skip": "if h_count <= 1: continue"},
    "reads_count": {"weigh": "{}\ny = y / (h.shape[0] + 1)"},
    "batch_mean": {"gather": "{}\nh = h - h.mean(dim=0, keepdim=True)"},
    "batch_max": {"weigh": "{}\ny = y / (1 + y.detach().abs().sum())"},
    "sorts_rows": {"weigh": "{}\ny = y.flip(0)"},
    "cumsum_rows": {"weigh": "{}\ny = y.cumsum(0)"},
    "scales_x": {"after": "x.mul_(1.25)\n{}"},
    "writes_x": {"after": "x[:1] = x[:1] + 1\n{}"},
    "adds_to_x": {"before": "{}\nout = x"},
    "next_expert": {"expert": "e = (e + 1) % E\n{}"},
    "first_expert": {"expert": "e = 0\n{}"},
    "weighs_twice": {"weigh": "{}\n{}"},
    "unweighted": {"weigh": ""},
    "number_in_arithmetic": {"weigh": "{}\ny = y * (e + 1)"},
    "fades": {"add": "out = out * 0.5\n{}"},
    "fades_in_place": {"add": "out.mul_(0.5)\n{}"},
    "feeds_back": {"gather": "{}\nh = h + out.mean()"},
    "reads_after": {"end": "out = out + y.sum()\n{}", "before": "{}\ny = x"},
    "last_number": {"end": "out = out * (e + 1)\n{}", "before": "{}\ne = 0"},
    "same_twice": {"route": "{}\nids = ids[:, :1].expand(-1, K).contiguous()"},
    "shifted_in_place": {"route": "{}\nids[:, 1] = ids[:, 0]"},
    "random": {"weigh": "{}\ny = F.rrelu(y, training=True)"},
    "grad_off": {"expert": "with torch.no_grad():\n    {}"},
    "weighs_by_a_step": {"route": "self.step += 1\n{}\nweights = weights / (1 + self.step)"},
    "weighs_by_a_counter": {"route": "{}\nweights = weights * (1 + self.total.sum())", "after": "self.total[0] += 1\n{}"},
    "adds_without_gradients": {"before": "{}\nout = x * 1.5", "add": "with torch.no_grad():\n    {}"},
    "detaches": {"weigh": "{}\ny = y.detach()"},
    "rounds": {"rebind": "{}\nout = out.bfloat16().to(x.dtype)"},
    "remembers_a_count": {"after": "self.calls = h_count\n{}"},
    "fills_a_dict": {"before": "{}\nnumbers = {'n': 0}", "after": "numbers['n'] += 1\n{}", "end": "out = out * numbers['n']\n{}"},
    "returns_early": {"after": "{}\nreturn out"},
    "returns_when_empty": {"skip": "if h_count == 0: return out"},
    "takes_from_an_iterator": {"before": "{}\nscales = iter(range(1, E + 1))", "weigh": "{}\ny = y * next(scales)"},
    "takes_from_a_generator": {"before": "{}\nscales = (float(i) for i in range(1, E + 1))", "weigh": "{}\ny = y * next(scales)"},
    "takes_from_a_dict": {"before": "{}\nscales = iter(dict.fromkeys(range(1, E + 1)))", "weigh": "{}\ny = y * next(scales)"},
    "one_mutates": {"after": "if e == 1: x.mul_(0.5)\n{}"},
    "one_is_odd": {"weigh": "{}\nif e == 2: y = y * 3"},
    "one_of_a_tuple_is_odd": {"weigh": "{}\ny = y * (1.0, 1.0, 2.0, 1.0)[e]"},
    "one_adds_elsewhere": {
        "before": "{}\nother = torch.zeros_like(x)", "add": "if e == 1: other = other + y.sum()\n{}",
        "end": "out = out + other\n{}",
    },
    "writes_weights": {"route": "{}\nweights = weights.clone()", "after": "weights.mul_(2.0)\n{}"},
    "carries_x": {"after": "x = x * 0.5\n{}"},
    "keeps_an_old_tensor": {
        "before": "{}\nscale, other = x.mean(), x.std()", "after": "scale = other\n{}", "end": "out = out * scale\n{}",
    },
    "sets_a_flag": {"before": "{}\nlast = False", "after": "last = e == E - 1\n{}", "end": "out = out + 1 if last else out\n{}"},
    "else_runs_one": {"skip": "if h_count == 0:\n    out = out + self.expert(e, x) * 0.1\n    continue"},
    "random_in_between": {"after": "torch.rand(3)\n{}", "end": "out = out + torch.rand_like(x)\n{}"},
}  # fmt: skip

COMPUTED_AGAIN = ("weighs_by_a_step", "weighs_by_a_counter")

LOOP_TWISTS: dict[str, dict[str, str]] = {
    "other_mask": {"hit": "hit = torch.arange(E) < 2"},
    "hit_by_many": {"hit": "hit = F.one_hot(ids, num_classes=E).sum(dim=(0, 1)) > 1"},
    "hit_shifted": {"hit": "{}\nhit = hit.roll(1)"},
    "other_unique": {"over": "(ids + 1).remainder(E).unique()"},
    "first_slot_only": {"select": "tok, slot = torch.where(ids[:, :1] == e)"},
    "wrong_slot": {"weigh": "y = y * weights[tok, 0, None]"},
    "wrong_entry": {"weigh": "y = y * (F.one_hot(ids, E) * weights[..., None])[tok, slot, (e + 1) % E, None]"},
    "complement": {"select": "tok, slot = torch.where(ids != e)\nh_count = tok.shape[0]"},
    "other_tokens": {"gather": "h = x[tok.flip(0)]"},
    "assigns": {"add": "out[tok] = y"},
    "all_but_last": {"over": "range(E - 1)"},
    "hit_by_first_slot": {"hit": "hit = F.one_hot(ids[:, :1].contiguous(), num_classes=E).sum(dim=(0, 1)) > 0"},
    "hit_by_other_data": {"hit": "hit = logits.sum(0) > 0"},
    "first_slots_unique": {"over": "ids[:, 0].unique()"},
    "neighbour_asked": {"skip": "if not (ids == (e + 1) % E).any(): continue"},
    "tokens_of_the_first": {"select": "tok, slot = torch.where(ids == 0)\nh_count = tok.shape[0]"},
}

CUT_TWISTS: dict[str, dict[str, str]] = {
    "starts_late": {"cut": "{}\nh_start = start + 1", "gather": "h = x[token][h_start:end]\nh = F.pad(h, (0, 0, 0, 1))[: end - start]"},
    "ends_late": {"offset": "start = 1"},
    "not_sorted": {"order": "{}\nperm = torch.arange(ids.numel())\ntoken = perm // K\nrows = x[token]"},
    "descending": {"order": "{}\nperm = ids.flatten().argsort(descending=True)\ntoken = perm // K\nrows = x[token]"},
    "other_counts": {"counts": "{}\ncounts = counts.flip(0)"},
    "other_routing": {"counts": "{}\ncounts = F.one_hot((-logits).topk(K)[1].flatten(), num_classes=E).sum(0)"},
    "counts_of_a_slot": {"counts": "{}\ncounts = torch.bincount(ids[:, 0], minlength=E)"},
    "counts_changed": {"counts": "{}\ncounts[0] += counts[1]\ncounts[1] = 0"},
    "list_length": {"end": "out = out * len(outs)\n{}"},
    "list_first": {"end": "out = out + outs[0].sum()\n{}"},
    "list_again": {"end": "out = out + torch.cat(outs).shape[0]\n{}"},
    "adds_the_offset": {"end": "out = out + end\n{}", "before": "{}\nend = 0"},
    "reversed": {"join": "ys = torch.cat(outs[::-1])"},
    "twice_in_list": {"add": "{}\n{}", "join": "ys = torch.cat(outs)[: rows.shape[0]]"},
    "other_order": {"join": "{}\nperm = perm.flip(0)"},
    "wrong_k": {"order": "{}\ntoken = perm % K\nrows = x[token]"},
    "pops_a_piece": {"join": "last = outs.pop()\nys = torch.cat([*outs, last * 2])"},
    "misses_the_last": {"cut": "if e == E - 1: break\n{}"},
    "asks_for_the_type": {"weigh": "{}\ny = y * (3.0 if isinstance(n, int) else 2.0)"},
}


@dataclass(frozen=True)
class Loop:
    """One program. ``over`` or ``cut`` says which kind of loop it is; parts of the other kind are ignored."""

    over: str = ""
    cut: str = ""
    mask: str = "equal"
    hit: str = "sum"
    skip: str = "no"
    gather: str = "index"
    add: str = "index_add_"
    counts: str = "one_hot"
    order: str = "argsort"
    rows: str = "rows"
    store: str = "stacked"
    twist: str = "none"
    ids: str = "topk"
    init: str = "zeros_like"
    rebind: str = "none"
    around_expert: str = "none"
    around_loop: str = "none"
    outside: bool = False
    weigh: str = "pair"
    between: str = "none"
    counter: str = "none"
    by_slot: bool = False
    behind: bool = False
    idle: bool = False
    laid: str = "own"
    tokens: int = 5

    @property
    def text(self) -> str:
        """The source of ``forward(self, x, logits)``; with ids from ``outside``, of ``forward(self, x, weights, ids)``, with any K."""
        parts = _cut_parts(self) if self.cut else _loop_parts(self)
        parts |= {"rebind": REBINDS[self.rebind], "around_expert": CONTEXTS[self.around_expert], "around_loop": CONTEXTS[self.around_loop]}
        for part, new in {**TWISTS, **LOOP_TWISTS, **CUT_TWISTS}[self.twist].items():
            parts[part] = _filled(new, parts.get(part, ""))
        if self.outside:
            parts["route"] = parts["route"].replace(_ROUTE, _GIVEN)
        text = _written(parts).replace(LAID["own"], LAID[self.laid], 1)
        return text.replace("x, logits", "x, weights, ids", 1) if self.outside else text


def _filled(new: str, old: str) -> str:
    lines = []
    for line in new.split("\n"):
        lead = line[: len(line) - len(line.lstrip())]
        lines += [lead + inner for inner in old.split("\n")] if line.strip() == "{}" else [line]
    return "\n".join(lines)


_ROUTE = "x = x.clone()\nweights, ids = torch.topk(logits.softmax(-1), K, dim=-1)\nweights = weights / weights.sum(-1, keepdim=True)"

_GIVEN = "x = x.clone()\nK = ids.shape[1]"


def _loop_parts(p: Loop) -> dict[str, str]:
    once, mask, slots_first = MASKS[p.mask]
    number = "e = e[0]" if p.over == "nonzero" else ""
    listed = p.over in ("range", "unique", "unique_list")
    table, weight = ("", "weights[tok, k, None]") if p.by_slot else WEIGHS[p.weigh]
    found = f"{'slot, tok' if slots_first else 'tok, slot'} = torch.where({mask})"
    found = "tok = torch.where(ids[:, k] == e)[0]" if p.by_slot else found
    skip = SKIPS[p.skip]
    return {
        "route": f"{_ROUTE}\n{IDS[p.ids]}".strip(),
        "hit": "" if listed else f"hit = {HITS[p.hit]}",
        "between": BETWEEN[p.between],
        "before": f"out = {INITS[p.init]}\n{once}\n{table}".rstrip(),
        "slots": "for k in range(K):" if p.by_slot else "",
        "over": OVER[p.over],
        "head": "for e in {over}:",
        "cut": number,
        "select": f"{found}\nh_count = tok.shape[0]",
        "skip": skip.replace("continue", f"\n    {IDLE}\n    continue") if p.idle else skip,
        "gather": "h = x" if p.behind else f"h = {GATHERS[p.gather]}",
        "expert": f"y = {STORES[p.store]}" + ("[tok]" if p.behind else ""),
        "weigh": f"y = y * {weight}",
        "add": ADDS[p.add],
        "after": COUNTERS[p.counter],
        "join": "",
        "end": "return out",
    }


def _cut_parts(p: Loop) -> dict[str, str]:
    before, head, cut, following = CUTS[p.cut]
    listed, filled = p.add == "append", p.add == "fill"
    whole = listed or filled
    join = ""
    if whole:
        join = "ys = torch.cat(outs, dim=0)\n" if listed else ""
        join += "out = torch.empty_like(ys)\nout[perm] = ys\nout = (out.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)"
    add = {"append": "outs.append(y)", "fill": "ys[start:end] = y"}.get(p.add) or ADDS[p.add]
    return {
        "route": f"{_ROUTE}\n{IDS[p.ids]}".strip(),
        "counts": f"counts = {COUNTS[p.counts]}",
        "order": ORDERS[p.order],
        "between": BETWEEN[p.between],
        "before": f"out = {INITS[p.init]}\nouts = []\nys = torch.zeros_like(rows)\n" + before,
        "offset": "start = 0",
        "head": head,
        "cut": f"{cut}\nh_count = n",
        "skip": CUT_SKIPS[p.skip],
        "select": "" if whole else "tok = token[start:end]",
        "gather": f"h = {ROWS[p.rows]}",
        "expert": f"y = {STORES[p.store]}",
        "weigh": "" if whole else "y = y * scale[start:end, None]",
        "add": add,
        "after": f"{COUNTERS[p.counter]}\n{following}".strip(),
        "join": join,
        "end": "return out",
    }


def _written(parts: dict[str, str]) -> str:
    def those(*names: str) -> list[str]:
        return [parts[name] for name in names if parts.get(name)]

    selection = ("cut", "skip", "select") if "counts" in parts else ("cut", "select", "skip")
    expert = _under(parts["around_expert"], those("gather", "expert", "weigh"))
    inside = [*those(*selection), *expert, *those("rebind", "add", "after")]
    head = parts["head"].replace("{over}", parts.get("over", ""))
    loop = _under(parts["around_loop"], _under(parts.get("slots", ""), _under(head, inside)))
    body = "\n".join([*those("route", "between", "hit", "counts", "order", "before", "offset"), *loop, *those("join", "end")])
    return "def forward(self, x, logits):\n" + textwrap.indent(body, "    ") + "\n"


def _under(head: str, statements: list[str]) -> list[str]:
    return [head, textwrap.indent("\n".join(statements), "    ")] if head else statements


def layer(loop: Loop) -> type[Layer]:
    """A layer with that forward, from a file that Dynamo and tracebacks can read."""
    name = f"<loop {next(_numbers)}>"
    linecache.cache[name] = (len(loop.text), None, loop.text.splitlines(keepends=True), name)
    space: dict[str, Any] = {"torch": torch, "F": F, "E": E, "H": H, "K": K}
    exec(compile(loop.text, name, "exec"), space)
    return type("Generated", (Layer,), {"forward": space["forward"]})


def twists(*, cut: bool) -> list[str]:
    """The twists that a kind of loop has a place for."""
    return [*TWISTS, *(CUT_TWISTS if cut else LOOP_TWISTS)]


def sensible(p: Loop) -> bool:
    """Whether the parts fit together: a twist that changes what is not there would be none."""
    twist = {**TWISTS, **LOOP_TWISTS, **CUT_TWISTS}[p.twist]
    if not p.cut and not _fits(p, twist):
        return False
    if p.init in LEAVES and (p.add != "index_add" or p.twist == "fades_in_place"):
        return False
    if p.cut:
        if p.tokens == 1 and (p.twist != "none" or p.ids != "topk"):
            return False  # where such a graph breaks, torch's own Dynamo fails on the sizes of its rest
        if p.store == "parts" or (p.counter != "none" and p.cut not in ("tensor", "bounds")):
            return False  # not fused: parts of sorted rows, and Python's numbers in counters
        if p.add in ("append", "fill") and (p.rebind != "none" or p.twist in ("weighs_twice", "unweighted")):
            return False
        if p.order != "argsort" and (p.add in ("append", "fill") or p.rows == "slots" or "order" in twist):
            return False  # there is no permutation
        if "counts" in twist and (p.order == "map_counted" or p.cut.startswith("occurring")):
            return False  # they are replaced, or not read
        joined = p.twist.startswith("list_") or "join" in twist
        return not ((joined and p.add != "append") or (p.rows != "rows" and p.twist == "starts_late"))
    if p.gather == "counted" and (p.over != "range" or p.skip in ("no", "any")):
        return False  # without rows the other size is open, and only a branch on their number goes around that
    return not (("hit" in twist and p.over in ("range", "unique", "unique_list")) or p.add in ("append", "fill"))


def _fits(p: Loop, twist: dict[str, str]) -> bool:
    """Whether the parts of a loop that selects rows fit together."""
    if p.mask in OF_WEIGHTS and (p.over != "range" or p.skip == "any"):
        return False  # a chosen expert whose weights are zero has no rows
    if p.by_slot and (p.over != "range" or p.mask != "equal" or p.weigh != "pair" or "weigh" in twist or "select" in twist):
        return False
    if p.tokens == 1 and p.over.startswith("unique"):
        return False  # not fused
    if p.behind and (p.gather != "index" or "gather" in twist):
        return False
    if p.weigh == "summed" and p.ids not in ("topk", "int32"):
        return False  # a repeated id has two rows with the weights of both
    rows = p.over == "range" and p.skip in ("numel", "len", "shape")
    return not p.idle or (rows and p.init not in LEAVES and p.add != "index_add" and p.store == "modules")
