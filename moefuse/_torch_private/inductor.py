"""Inductor: its options, its compiler, its mistakes, and the passes that it takes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from moefuse._torch_private.cpp import no_compiler
from moefuse._torch_private.errors import surfacing
from moefuse._torch_private.floats import compiled_for_their_values
from moefuse._torch_private.order import communicates, keep_order
from moefuse._torch_private.types import CompiledFn
from moefuse.errors import CompilerError


def inductor_option_names() -> frozenset[str]:
    """Names that ``torch.compile(backend="inductor", options=...)`` accepts."""
    from torch._inductor import list_options

    return frozenset(list_options())


def is_inductor_option(name: str, value: object) -> bool:
    """Whether Inductor knows the option, whatever it thinks of the value."""
    if name.replace("-", "_") in inductor_option_names():
        return True
    try:
        # Since torch 2.15 a device's backend can have options of its own, which the list does not show.
        torch._TorchCompileInductorWrapper(None, {name: value}, None)
    except RuntimeError as error:
        return not str(error).startswith("Unexpected optimization option")
    return True


def inductor_config(mode: str | None, options: Mapping[str, object]) -> dict[str, Any]:
    """Config patches for ``mode`` and ``options``, checked as ``torch.compile(backend="inductor")`` checks them.

    Raises:
        RuntimeError: torch's own error for an unknown mode or a value of the wrong type.
    """
    # torch's own wrapper also applies CompilerBisector and the CUDA-graph workarounds that depend on these settings.
    wrapper = torch._TorchCompileInductorWrapper(mode, dict(options), None)
    return dict(wrapper.config)


def keeps_random_stream() -> bool:
    """Whether Inductor is to draw the random numbers that eager draws, instead of others of the same distribution."""
    from torch._inductor import config

    return bool(config.fallback_random)


@contextlib.contextmanager
def random_stream_of(patches: Mapping[str, Any]) -> Iterator[None]:
    """Let :func:`keeps_random_stream` answer for a compilation with these config patches."""
    if "fallback_random" not in patches:
        yield
        return
    from torch._inductor import config

    with config.patch(fallback_random=patches["fallback_random"]):
        yield


def compile_fx(
    gm: torch.fx.GraphModule, example_inputs: Sequence[object], config_patches: dict[str, Any], name: str | None = None
) -> CompiledFn:
    """Hand the graph to Inductor; ``name`` is what ``torch.compile(name=...)`` calls the region, where torch has that.

    Raises:
        CompilerError: Inductor has C++ to compile, and finds no compiler; a backward that is compiled later raises it, too.
    """
    from torch._inductor.compile_fx import compile_fx as inductor_compile_fx

    keep_what_is_mutated()
    if communicates(gm):
        keep_order()
        # It moves calls, in inference, before there is anything that lowering could hold in order.
        config_patches = {**config_patches, "reorder_for_locality": False}
        config_patches = partitioned(config_patches)
    inputs: Any = list(example_inputs)
    named: dict[str, Any] = {} if name is None else {"compile_region_name": name}
    with compiled_for_their_values(gm):
        return cast(CompiledFn, inductor_compile_fx(gm, inputs, _compile_inner, config_patches, **named))


def _compile_inner(*args: Any, **kwargs: Any) -> Any:
    """Compile one graph, forward or backward, as Inductor does by itself.

    Inductor alone knows what it writes C++ for: not for a model on a GPU, nor for what torch's own operators compute.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    with surfacing(CompilerError):
        try:
            return compile_fx_inner(*args, **kwargs)
        except InductorError as error:
            if not isinstance(error.inner_exception, InvalidCxxCompiler):
                raise
            raise CompilerError(no_compiler()) from None


@functools.cache
def keep_what_is_mutated() -> None:
    """From now on Inductor's CPU backend still knows that a loop reads what another one has mutated after it has split that loop anew.

    It forgot that (torch 2.11 to 2.13, https://github.com/pytorch/pytorch/issues/185509), and read zeros before anything was scattered into
    them. GPT-OSS with router logits lost the gradient of its router so, in graphs of ours that are right.
    """
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode
    from torch.utils._ordered_set import OrderedSet

    original = getattr(SchedulerNode, "recompute_size_and_body", None)
    if original is None or not hasattr(SchedulerNode, "set_read_writes"):
        return

    @functools.wraps(original)
    def recompute_size_and_body(node: Any, *args: Any, **kwargs: Any) -> None:
        # What a loop waits for without reading it is not in its body; torch 2.11 forgets that as well.
        waits = OrderedSet(dep for dep in node.read_writes.reads if isinstance(dep, WeakDep | StarDep))
        original(node, *args, **kwargs)
        if waits or getattr(node, "mutation_renames", None):
            node.set_read_writes(node.read_writes.with_read(waits).rename(node.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute_size_and_body  # type: ignore[method-assign,assignment]


_PARTITIONER = "custom_partitioner_fn"
_BACKWARD: list[Callable[[torch.fx.GraphModule], None]] = []


def in_backward(change: Callable[[torch.fx.GraphModule], None]) -> None:
    """Have ``change`` see every graph of backward of programs that communicate, before it is lowered."""
    _BACKWARD.append(change)


def partitioned(patches: dict[str, Any]) -> dict[str, Any]:
    """``patches`` with a partitioner that has no layer make a result again that nobody reads, and puts what forward saves for backward into
    the order that AOTAutograd reads it in.

    The mesh of a distributed input, which its gradient is made with, comes last, but for sizes. Where a checkpoint draws random numbers,
    or could (attention), torch puts the states of the generator behind it, and then takes the mesh for a tensor (torch 2.13).
    """
    from torch._inductor import config

    users = patches.get(_PARTITIONER, getattr(config, _PARTITIONER))
    return {**patches, _PARTITIONER: _partitioner(users)}


def _partitioner(users: Any) -> Any:
    return _partitioner_class()(users)


@functools.cache
def _partitioner_class() -> Any:
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        """The user's partitioner or Inductor's own, and the order behind it."""

        def __init__(self, users: Any) -> None:
            self._users = users

        def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            forward, backward = (self._users or min_cut_rematerialization_partition)(gm, joint_inputs, **kwargs)
            objects_last(forward, backward, kwargs["num_fwd_outputs"])
            for change in _BACKWARD:
                change(backward)
            return forward, backward

        def uuid(self) -> Any:
            if self._users is None:
                return "moefuse: objects last"
            users = self._users.uuid()
            return users and f"moefuse: objects last after {users!r}"  # None: Inductor does not cache, as it would not without this

        def __reduce__(self) -> Any:
            # Keys of Inductor's caches have the pickled config, too.
            return _partitioner, (self._users,)

    return Partitioner


def objects_last(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, outputs: int) -> None:
    """Of what forward saves, behind so many ``outputs``, put objects behind tensors and before sizes; and in backward's inputs."""
    end = forward.graph.output_node()
    given: Any = end.args[0]
    saved = given[outputs:]
    kinds = [_kind(node) for node in saved]
    if "object" not in kinds or "tensor" not in kinds[kinds.index("object") :]:
        return
    in_order = [node for wanted in ("tensor", "object", "size") for node, kind in zip(saved, kinds, strict=True) if kind == wanted]
    end.args = ((*given[:outputs], *in_order),)
    forward.recompile()
    inputs = backward.graph.find_nodes(op="placeholder")[: len(saved)]  # sizes first
    behind = inputs[-1].next
    for node in inputs:
        if _kind(node) == "object":
            behind.prepend(node)
    backward.recompile()


def _kind(node: torch.fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return "size"
    return "tensor" if value is None or isinstance(value, torch.Tensor) else "object"


def compile_region(gm: torch.fx.GraphModule, backend: Any) -> CompiledFn:
    """``torch.compile`` of a graph for the sizes that it is called with, numbers of selected rows left open."""
    from torch._dynamo import config

    # Dynamo skips the forward of a graph module that is called by itself; and it counts recompilations per code object.
    def call(*args: Any) -> Any:
        return gm(*args)

    call.__code__ = call.__code__.replace()
    compiled = torch.compile(call, backend=backend, dynamic=False, fullgraph=True)

    def run(*args: Any) -> Any:
        with config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
            return compiled(*args)

    return run


def records_graphs(patches: Mapping[str, Any]) -> bool:
    """Whether Inductor records CUDA graphs under these patches of its config."""
    from torch._inductor import config

    return bool(patches.get("triton.cudagraphs", config.triton.cudagraphs))


_STAMPED_PASS = "post_grad_custom_post_pass"


def with_stamp(patches: Mapping[str, Any], make_stamp: Callable[[Any], Any]) -> dict[str, Any]:
    """``patches`` plus a stamp behind the passes that the user has in Inductor's last custom-pass slot.

    ``make_stamp`` is called with the pass that the stamp has to run first, or with None.
    """
    from torch._inductor import config, custom_graph_pass

    present = patches.get(_STAMPED_PASS, getattr(config, _STAMPED_PASS))
    if present is None:
        return {**patches, _STAMPED_PASS: make_stamp(None)}
    if not hasattr(custom_graph_pass, "get_custom_graph_passes"):
        # Before torch 2.13 the slot holds one pass and no list.
        return {**patches, _STAMPED_PASS: make_stamp(present)}
    users = list(present) if isinstance(present, list | tuple) else [present]
    return {**patches, _STAMPED_PASS: [*users, make_stamp(None)]}
