"""What a checkpointed part of the program returns is kept for backward, where other ranks take part in computing it again.

Eager checkpointing keeps it: it is an input of what follows. A partitioner may rather compute the part once more for the sake of the next
one, whichever it takes for smaller, which is by sizes: a rank with one token dispatched the tokens of two layers, and then went backward,
where one with four took turns. No partitioner computes ops of others again that were not told to be.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from moefuse import _torch_private
from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.values import tensors_in

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def keep_results(gm: GraphModule) -> bool:
    """Put ``moefuse::own`` behind the checkpoints of a graph that communicate; whether there are any."""
    kept = [out for call in gm.graph.find_nodes(op="call_function", target=CHECKPOINT) if _communicates(gm, call) for out in _results(call)]
    for out in kept:
        with gm.graph.inserting_after(out):
            own = gm.graph.call_function(torch.ops.moefuse.own.default, (out,))
        own.meta = dict(out.meta)
        out.replace_all_uses_with(own)
        own.args = (out,)
    return bool(kept)


def _communicates(gm: GraphModule, call: Node) -> bool:
    body = call.args[0]
    part = getattr(gm, str(body.target), None) if isinstance(body, Node) and body.op == "get_attr" else None
    return isinstance(part, GraphModule) and _torch_private.communicates(part)


def _results(call: Node) -> list[Node]:
    """Its tensors that have gradients, and memory that no other value has: who writes to one of those writes to others."""
    outs = [user for user in call.users if user.target is operator.getitem]
    seen = [_torch_private.storage_key(t) for node in (*call.all_input_nodes, *outs) for t in tensors_in(node.meta.get("example_value"))]
    found = []
    for out in outs:
        value = tensor(out)
        if value is None or not value.requires_grad or not value.is_contiguous():
            continue
        if seen.count(_torch_private.storage_key(value)) == 1:
            found.append(out)
    return found
