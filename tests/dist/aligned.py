"""Results of the operations that communicate, which lie as their fakes say (``tests/cpu/aligned_case.py``)."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

import moefuse
from moefuse.ops import autograd
from moefuse.parallel import views
from moefuse.runtime import groups
from tests.cpu.aligned_case import Aligned
from tests.cpu.ops_case import Case
from tests.dist import layers, posing, scenes

E = 4
ops = torch.ops.moefuse


def travelling(rank: int, hosts: str, counts: tuple[int, ...], **how: Any) -> tuple[set[str], list[str]]:
    """Tokens on their way there and back, in training and as one op: (operations, what is wrong)."""
    if hosts:
        posing.on(rank, hosts)
    model = layers.Model(layers.Stacked, E)
    layer = moefuse.parallelize(model, scenes.mesh(), **how).layers[0]
    terms, place = layer.terms[0].text, model.first._moefuse_place
    held = len(layer.here) if how.get("experts") != "tp" else E
    case = Case(counts[rank], experts=E, dtype=torch.float32)
    x, ids, weights, *lists = case.args(requires_grad=True)
    here = [[weight[:held] for weight in part] for part in lists]
    placed = {"place": place, "slots": layer.placement.slots, "terms": terms, "layer": "first"}
    with Aligned() as found:
        ops.ep_local_ids(ids, place, layer.placement.slots, terms)
        rows, scores, local, *handle = ops.ep_dispatch([x, weights], ids, place, layer.placement.slots, terms, "first")
        y = ops.experts(rows, local, scores, *here, **case.options)
        ops.ep_combine(y, handle, len(x), terms, "first").sum().backward()
        bounded = groups.Terms.parse(terms).bound == "exact"
        if bounded:
            room = ops.room(local.detach())
            rows, scores = rows.detach().requires_grad_(), scores.detach()
            ops.bounded_experts(rows, local, scores, *here, room=room, terms=terms, layer="first", **case.options).sum().backward()
        if layer.terms[0].transport == "allgather":
            with torch.no_grad():
                ops.ep_experts(x, ids, weights, *here, limit=1, **placed, **case.options)
            with mock.patch.object(autograd, "IN_PARTS", ("cpu",)):
                ops.ep_experts(x, ids, weights, *here, **placed, **case.options).sum().backward()
    return found.seen, found.wrong


def gathered(rank: int, **how: Any) -> tuple[set[str], list[str]]:
    """Weights in full, and their gradients, of three experts on one rank and two on the other, or of slices."""
    model = layers.Model(layers.Stacked, 5)
    plan = moefuse.parallelize(model, scenes.mesh(), **how)
    with Aligned() as found:
        model(torch.randn(7, layers.H)).sum().backward()
        terms = plan.layers[0].terms[0].text
        ops.on_one_rank(torch.randn(7, requires_grad=True), terms).sum().backward()
        place = getattr(model.first, views.PLACE, None)
        mine = None if place is None else ops.own_numbers(place, 3, len(plan.layers[0].here), terms)
        ops.own_experts(torch.randn(5, 3, requires_grad=True), mine, place, 3, terms).sum().backward()
    return found.seen, found.wrong
