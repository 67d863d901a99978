"""Root causes and defences, as what stands in their place when moefuse is broken: each is a list of (owner, name, replacement)."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar
from unittest import mock

from torch.fx import Node

from moefuse.capture import compared
from moefuse.capture.dynamo import module_calls, relations, values
from moefuse.ops.meaning import composite
from moefuse.passes import driver, replacement
from moefuse.passes.graph.calls import call_of, fake, tensor
from moefuse.passes.graph.storage import Memory
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import Cast
from moefuse.passes.ir.regions import Region
from moefuse.passes.lower import lower
from moefuse.passes.lower.operands import Operands
from moefuse.passes.match import interpret, liveness, safety, templates
from moefuse.passes.match.arguments import taken
from moefuse.passes.prove import effects, synthetic_inputs, verify
from moefuse.passes.prove.region_key import _Form
from moefuse.passes.rules.rows import views

Broken = tuple[tuple[object, str, Any], ...]
_Program = TypeVar("_Program")


@contextmanager
def put_back(*faults: Broken) -> Iterator[None]:
    """Moefuse with these faults."""
    with ExitStack() as stack:
        for owner, name, instead in (part for fault in faults for part in fault):
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield


def search(
    fault: Broken, draw: Callable[[int], _Program], wrong: Callable[[_Program], list[str]], most: int = 500, seed: int = 0
) -> tuple[int, _Program] | None:
    """(how many programs it took, program) to see a fault; None if so many do not."""
    rng = random.Random(seed)
    with put_back(fault):
        programs = (draw(rng.randrange(1 << 30)) for _ in range(most))
        return next(((count, p) for count, p in enumerate(programs, 1) if wrong(p)), None)


# --- storages by names ------------------------------------------------------------------------------------------------------------

_ALIASING = frozenset(
    (
        "view reshape transpose t permute squeeze unsqueeze expand expand_as flatten unflatten chunk split tensor_split narrow select "
        "unbind getattr T mT view_as reshape_as contiguous to type_as detach alias movedim split_with_sizes unfold diagonal ravel"
    ).split()
)


def _key_by_name(memory: Memory, node: Node) -> frozenset[int]:
    """The storage of the first argument where the name of the operation is on the list, else one of its own."""
    own, call = frozenset((memory.position[node],)), call_of(node, memory.targets[node])
    if call is not None and call.targets:
        return memory._keys[call.targets[0]]
    if call is None or not call.args or not isinstance(source := call.args[0], Node):
        return own
    before, after = tensor(source), tensor(node)
    if call.name in ("to", "type_as") and before is not None and after is not None and before.dtype != after.dtype:
        return own
    if call.name == "getitem" and isinstance(fake(source), tuple | list):
        made = call_of(source, ())
        return memory._keys[source] if made is not None and made.name in _ALIASING else own
    shares = call.name in _ALIASING or (call.name == "getitem" and not _by_tensors(call.args[1]))
    return memory._keys[source] if shares else own


def _by_tensors(index: object) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return any(isinstance(i, list) or (isinstance(i, Node) and tensor(i) is not None) for i in items)


STORAGE_BY_NAMES: Broken = ((Memory, "_read", _key_by_name), (Memory, "_join_hidden", lambda memory, graph: None))


# --- writes -----------------------------------------------------------------------------------------------------------------------

_effect, _written, _has_effect = liveness._effect, liveness._written, effects._has_effect


def _outlives(ctx: Context, node: Node) -> bool:
    """Whether a node of torch's writes to what outlives the call."""
    targets = ctx.memory.targets.get(node, ()) if not liveness.users_own(node) else ()
    return any(ctx.memory.outlives(name) for t in targets for name in ctx.memory.storages(t))


UPDATES_DROPPED: Broken = (
    (liveness, "_effect", lambda ctx, node: not _outlives(ctx, node) and _effect(ctx, node)),
    (liveness, "_written", lambda ctx, write: [] if _outlives(ctx, write) else _written(ctx, write)),
)


def _every_write(ctx: Context, region: Region) -> set[Node]:
    """Every write to the storage that the sum is accumulated in, up to its end."""
    names = ctx.memory.storages(region.base) if region.base is not None else ()
    last = ctx.position[region.anchor]
    return {w for name in names for w in ctx.writes.get(name, ()) if ctx.position[w] <= last}


ERASED_IN_REGION: Broken = ((safety, "own_writes", _every_write),)


# --- facts ------------------------------------------------------------------------------------------------------------------------

CASTS_KEEP_IDS: Broken = ((views, "holds", lambda dtype, numbers: True), (views, "counts", lambda dtype, most: True))


ALL_CASTS_ROUND: Broken = ((Cast, "rounds", True),)


# --- what the program asks for ----------------------------------------------------------------------------------------------------

EQUAL_BY_NAME: Broken = ((compared, "_of_the_run", lambda attempt, tx, variables: None),)
COMPARED_AS_OBJECTS: Broken = ((values, "symbolic", lambda variable: False),)
"""Together: symbolic numbers are asked for by ``in``, where Dynamo says that none is equal."""

CONTIGUOUS: Broken = ((lower, "in_layout", lambda emit, node, like: node),)

OVERLAPS_UNASKED: Broken = ((relations, "watch", lambda output, inputs, exact=True: None),)

KEPT_AS_GIVEN: Broken = ((Operands, "kept_tokens", Operands.tokens),)
"""What backward reads is the tokens themselves, whoever has them too."""

HOOKS_UNSEEN: Broken = ((module_calls, "watch", lambda output, traced: None),)


# --- defences ---------------------------------------------------------------------------------------------------------------------

NO_LAST_LOOK: Broken = ((driver, "compare", lambda ctx, before: None),)

REAL_VALUES: Broken = ((synthetic_inputs, "like", lambda value, generator: value), (synthetic_inputs, "neutral", lambda experts: False))
"""The proof takes parameters and buffers as they are."""


def _by_names_alone(
    ctx: Context,
    region: Region,
    new_nodes: Sequence[Node],
    tier: str,
    known: Mapping[Node, Any] | None = None,
    assumptions: object = (),
) -> Hashable:
    """What the experts compute, and of everything around them the names of the operations."""
    names = tuple(str(n.target) for n in ctx.graph.nodes if n in region.nodes)
    expr = _Form(ctx, region, known or {}).of(region.expr)
    return tier, region.domain, region.routing.top_k, region.num_experts, region.base is None, expr, names


def _swallowed(*call: Any) -> Any:
    return replace(taken(*call), unread=())


SWALLOWED: Broken = ((interpret, "taken", _swallowed),)
"""Options that a rule does not name are passed over."""

ONLY_VALUES: Broken = ((templates, "same_derivative", lambda *_: True),)
"""What has the values of an activation is one."""

NO_GRADIENTS: Broken = ((verify, "comparable", lambda *_: False),)
"""The proof compares values alone."""

EQUAL_LAYERS: Broken = ((replacement, "signature", _by_names_alone),)


# --- what is around a call --------------------------------------------------------------------------------------------------------

TANGENTS_UNSEEN: Broken = ((composite, "_transformed", lambda tensors, whole: False),)
"""Where forward-mode AD is on, kernels run as ever."""

# --- words ------------------------------------------------------------------------------------------------------------------------

NAMES_OF_NODES: Broken = ((safety, "named", lambda node: f"`{node.name}`"),)
"""Refusals of regions name values as the graph does."""
