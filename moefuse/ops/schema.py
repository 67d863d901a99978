"""Schemas of every moefuse op, in one place; importing this defines them (without kernels)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from moefuse._torch_private import failures, when_functionalized
from moefuse.ops.meaning.call import first_tensor
from moefuse.ops.meaning.composite import batched, transformable

_LISTS = (
    "Tensor x, Tensor ids, Tensor weights, Tensor[] w_in, Tensor[] w_up, Tensor[] w_out, Tensor[] b_in, Tensor[] b_up, Tensor[] b_out, "
)
_OPTIONS = (
    'str activation="silu", float[] activation_args=[], str gating="merged", bool up_first=False, bool weight_on_input=False, '
    "ScalarType? out_dtype=None"
)
_EXPERTS_ARGS = f"{_LISTS}*, {_OPTIONS}"
_FACTORS = "Tensor[] a_in, Tensor[] l_in, Tensor[] a_up, Tensor[] l_up, Tensor[] a_out, Tensor[] l_out, "
# The internal ops take one list for all tensors and one integer for all options (moefuse/ops/body.py): few arguments make a call cheap.
_PACKED = "Tensor[] tensors, int[] counts, int body, float arg0, float arg1, ScalarType out_dtype"
_PACKED_BACKWARD = "Tensor[] tensors, int[] counts, int needs, int body, float arg0, float arg1"
_BODY = "int body, float arg0, float arg1"
_EXTENDED = "Tensor[] tensors, int[] counts, float[] scales, str[] encodings"
_KEPT = "(Tensor out, Tensor h, Tensor order, Tensor offsets)"

SCHEMAS: tuple[str, ...] = (
    f"experts({_EXPERTS_ARGS}) -> Tensor",
    f"experts_infer({_PACKED}) -> Tensor",
    f"experts_forward({_PACKED}) -> {_KEPT}",
    *(f"experts_backward{part}({_PACKED_BACKWARD}) -> Tensor[]" for part in ("", "_rows", "_in", "_out")),
    f"experts_extended({_LISTS}{_FACTORS}Tensor[] codes, *, float[] scales=[], str[]? encodings=None, bool recompute=False, {_OPTIONS}) "
    "-> Tensor",
    f"experts_extended_infer({_EXTENDED}, {_BODY}, ScalarType out_dtype) -> Tensor",
    f"experts_extended_forward({_EXTENDED}, {_BODY}, ScalarType out_dtype) -> {_KEPT[:-1]}, Tensor u)",
    f"experts_extended_hidden({_EXTENDED}, {_BODY}, Tensor order, Tensor offsets, Tensor u) -> Tensor",
    f"experts_extended_backward({_EXTENDED}, int needs, {_BODY}) -> Tensor[]",
    "unpacked(Tensor storage, Tensor[] codes, str encoding, ScalarType dtype) -> Tensor",
    f"recomputed_experts({_EXPERTS_ARGS}) -> Tensor",
    "experts_hidden(Tensor[] tensors, int[] counts, int body, float arg0, float arg1, Tensor order, Tensor offsets) -> Tensor",
    f"shared_start({_PACKED}, int overlap) -> Tensor",
    "shared_join(Tensor routed, Tensor shared, Tensor? weight, float scale, Tensor[] inputs, int overlap) -> Tensor",
    "permute(Tensor x, Tensor ids, int num_experts) -> (Tensor xs, Tensor order, Tensor offsets)",
    "grouped_linear(Tensor xs, Tensor offsets, Tensor[] w, Tensor[] b) -> Tensor",
    "grouped_linear_backward(Tensor grad, Tensor xs, Tensor offsets, Tensor[] w, Tensor[] b, bool[] needs) -> Tensor[]",
    "grouped_linear_coded(Tensor xs, Tensor offsets, Tensor[] w, Tensor[] codes, Tensor[] b, str encoding) -> Tensor",
    "grouped_linear_coded_backward(Tensor grad, Tensor offsets, Tensor[] w, Tensor[] codes, Tensor[] b, str encoding, bool[] needs) -> "
    "Tensor[]",
    "expert_rows(Tensor[] v, Tensor offsets, SymInt num_rows) -> Tensor",
    "expert_rows_backward(Tensor grad, Tensor[] v, Tensor offsets) -> Tensor[]",
    "combine(Tensor ys, Tensor? weights, Tensor order, Tensor offsets, SymInt top_k, ScalarType? out_dtype) -> Tensor",
    "own(Tensor x) -> Tensor",
    "topk(Tensor scores, int k) -> (Tensor values, Tensor ids)",
    "router_logits(Tensor x, Tensor w, Tensor? bias, ScalarType out_dtype) -> Tensor",
    "route(Tensor logits, Tensor? bias, int k, str score, int groups, int kept, int best, bool lowest, bool by_choice, str weight, "
    "bool renormalise, float eps, float least, float scale, ScalarType out_dtype) -> (Tensor weights, Tensor ids)",
    "gathered(Tensor local, Tensor place, int slots, str terms) -> Tensor",
    "gathered_backward(Tensor grad, Tensor place, int slots, SymInt held, str terms) -> Tensor",
    "gathered_slices(Tensor local, int axis, int blocks, str terms) -> Tensor",
    "gathered_slices_backward(Tensor grad, int axis, int blocks, str terms) -> Tensor",
    "on_one_rank(Tensor x, str terms) -> Tensor",
    "on_one_rank_backward(Tensor grad, str terms) -> Tensor",
    "own_numbers(Tensor place, int slots, int held, str terms) -> Tensor",
    "own_experts(Tensor whole, Tensor? mine, Tensor? place, int slots, str terms) -> Tensor",
    "own_experts_backward(Tensor grad, Tensor? place, int slots, str terms) -> Tensor",
    "ep_local_ids(Tensor ids, Tensor? place, int slots, str terms) -> Tensor",
    "row_codes(Tensor x, str rounding) -> Tensor",
    "ep_dispatch(Tensor[] rows, Tensor ids, Tensor? place, int slots, str terms, str layer, Tensor[]? trained=None) -> Tensor[]",
    "ep_combine(Tensor y, Tensor[] handle, SymInt tokens, str terms, str layer, *, Tensor? place=None) -> Tensor",
    f"bounded_experts({_EXPERTS_ARGS}, Tensor? room=None, str terms, str layer) -> Tensor",
    "room(Tensor ids) -> Tensor",
    "keep_rows(Tensor h, Tensor offsets, Tensor? room, str terms, str layer) -> Tensor",
    "restore_rows(Tensor kept, Tensor order) -> Tensor",
    f"ep_experts({_EXPERTS_ARGS}, Tensor? place=None, int slots=0, str terms, str layer, int? limit=None, bool recompute=False) -> Tensor",
    f"ep_experts_infer({_PACKED}, Tensor? place, int slots, str terms, str layer, int? limit) -> Tensor",
    f"ep_experts_forward({_PACKED}, Tensor? place, int slots, str terms, str layer, *, bool result=True) -> Tensor[]",
    f"ep_backward_rows({_PACKED_BACKWARD}, Tensor[] handle, SymInt arrivals, str terms, str layer, *, Tensor? place=None) -> Tensor[]",
    f"ep_backward_in({_PACKED_BACKWARD}, Tensor[] rows, Tensor[] handle, SymInt tokens, str terms, str layer, *, Tensor? place=None) "
    "-> Tensor[]",
    "ep_send(Tensor[] rows, Tensor[] handle, SymInt arrivals, float scale, str terms, str layer, *, Tensor? place=None) -> Tensor[]",
    "ep_give_back(Tensor[] rows, Tensor[] handle, SymInt tokens, float scale, str terms, str layer, *, Tensor? place=None) -> Tensor[]",
    "combine_backward(Tensor grad, Tensor ys, Tensor? weights, Tensor order, Tensor offsets, SymInt top_k, bool[] needs) -> Tensor[]",
)

ON_CPU = ("experts_infer", "experts_forward", "experts_backward")
"""Ops that have a kernel in C++ on the CPU (moefuse/runtime/native.py)."""
TRAVELS = ("ep_dispatch", "ep_combine", "ep_send", "ep_give_back")
SPREAD = ("ep_experts_forward", "ep_backward_rows", "ep_backward_in")
"""What ``ep_experts`` is where it is differentiated (moefuse/ops/spread.py)."""
COMPILED = (
    *TRAVELS, *SPREAD, "row_codes",
    "experts_forward", "experts_hidden", "experts_backward_rows", "experts_backward_in", "experts_backward_out", "experts_extended_forward",
    "experts_extended_hidden", "experts_extended_backward", "permute", "grouped_linear", "grouped_linear_backward", "grouped_linear_coded",
    "grouped_linear_coded_backward", "expert_rows", "expert_rows_backward", "combine", "combine_backward",
)  # fmt: skip
"""Ops whose place in a graph for Inductor is taken by one with ``_compiled`` behind the name, which has no entry at autograd: those are in
Python, and what AOTAutograd calls is below autograd."""
COMPILED_ON = ("cuda",)
"""Devices where they are: on a CPU calls cost what they compute."""
TWINS = frozenset((*ON_CPU, "experts_extended_infer", "ep_experts_infer", *(f"{name}_compiled" for name in COMPILED)))
"""Ops with a twin, ``_general`` behind the name: the Python that C++ asks for what it does not know. On CUDA it plays all of them
(kernels/triton/launch/player.py)."""


def _every(schema: str) -> Iterator[str]:
    """An op's schema, and those of what may be called in its place."""
    name, _, rest = schema.partition("(")
    yield schema
    if name in TWINS:
        yield f"{name}_general({rest}"
    if name in COMPILED:
        yield from _every(f"{name}_compiled({rest}")


# The caller's strides are part of the contract (in-out weight storage arrives as a transposed view), so Inductor must not re-lay inputs.
_TAGS = tuple(getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "needs_exact_strides") if hasattr(torch.Tag, name))

LIBRARY = torch.library.Library("moefuse", "DEF")
for _schema in SCHEMAS:
    for _text in _every(_schema):
        LIBRARY.define(_text, tags=_TAGS)

TAKES_IDS = tuple(
    getattr(torch.ops.moefuse, name).default
    for name, _, arguments in (schema.partition("(") for schema in SCHEMAS)
    if arguments.split(", ")[1:2] == ["Tensor ids"]
)
"""Ops whose second argument is the ids of experts: what looks for a layer's choice of experts in a graph finds it there."""


def _twin(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, recorded where a C++ that plays records asks for that; it has been imported if there is one."""

    def general(*args: Any, **options: Any) -> Any:
        record: Any = sys.modules.get("moefuse.kernels.triton.launch.record")
        return kernel(*args, **options) if record is None else record.asked(kernel, args, options)

    return general


def _compiled(name: str, *args: Any) -> Callable[..., Any] | None:
    """What is traced instead of an op."""
    return getattr(torch.ops.moefuse, name).default if first_tensor(args).device.type in COMPILED_ON else None


def implement(
    name: str,
    *,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any] | None,
    composite: Callable[..., Any] | None = None,
    general: Callable[..., Any] | None = None,
) -> None:
    """Register one op, and what may be called in its place.

    Args:
        kernel: for every device.
        fake: for tracing.
        autograd: above both; None: it only runs below autograd.
        composite: the op in torch's own operations, for whatever transforms a call (``moefuse/ops/meaning/composite.py``).
        general: of the twin, if that is another kernel.
    """
    if name in TWINS:
        implement(f"{name}_general", kernel=failures.told(_twin(general or kernel)), fake=fake, autograd=None)
    if name in COMPILED:
        implement(f"{name}_compiled", kernel=kernel, fake=fake, autograd=None)
        when_functionalized(f"moefuse::{name}", LIBRARY, functools.partial(_compiled, f"{name}_compiled"))
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    above = torch.library.fallthrough_kernel if autograd is None else transformable(name, autograd, composite)
    LIBRARY.impl(name, above, "Autograd")
    if composite is not None:
        for key in ("FuncTorchBatched", "Batched"):  # the latter is what is_grads_batched still goes through
            LIBRARY.impl(name, batched(name, composite), key)
    torch.library.register_fake(f"moefuse::{name}", fake, lib=LIBRARY)
