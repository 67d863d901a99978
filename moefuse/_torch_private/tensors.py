"""What torch knows of tensors and operators: storages, fakes, writes, schemas."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch


def storage_key(t: torch.Tensor) -> int:
    """Equal for two living tensors exactly if they are views of one allocation. Without such memory: itself."""
    try:
        return int(t.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and other opaque layouts
        return id(t)


def _operator_name(schema: Any) -> str:
    """The name by which the dispatcher knows an operator."""
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)


def has_kernel(schema: Any) -> bool:
    """Whether a schema is that of an operator on tensors, not of a method of TorchScript's lists and dicts, which have the same names."""
    return bool(torch._C._dispatch_has_kernel(_operator_name(schema)))


def is_composite(schema: Any) -> bool:
    """Whether an operator is made of others, or TorchScript's own, so that its schema may keep to itself that the result is an input."""
    return not has_kernel(schema) or bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(_operator_name(schema), "CompositeImplicitAutograd")
    )


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fake tensors stand for views of one allocation."""
    return storage_key(a) == storage_key(b)


def is_distributed(value: object) -> bool:
    """Whether a value is a tensor of which each rank holds a part."""
    return isinstance(value, torch.Tensor) and type(value) is not torch.Tensor and hasattr(value, "to_local")


@contextlib.contextmanager
def trying_on_fakes(value: object) -> Iterator[None]:
    """Run something on fake tensors for what it shows, as eager would: without decompositions. New symbols that it makes are nobody's."""
    first = next((t for t in (value if isinstance(value, tuple | list) else (value,)) if isinstance(t, torch.Tensor)), None)
    mode = getattr(first, "fake_mode", None)
    environment = getattr(mode, "shape_env", None)
    ignoring = contextlib.nullcontext() if environment is None else environment.ignore_fresh_unbacked_symbols()
    # The mode, since an operator may make tensors on its way: ``where(c, x, 0.0)`` makes one of the number.
    with mode or contextlib.nullcontext(), ignoring, torch.no_grad(), torch._C._DisablePythonDispatcher():
        yield


def is_transformed(value: torch.Tensor) -> bool:
    """Whether a traced tensor belongs to a level of torch.func: it is batched, or differentiated once more."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """Nested containers with other tensors in the place of theirs."""
    from torch.utils import _pytree

    return _pytree.tree_map_only(torch.Tensor, change, values)


@contextlib.contextmanager
def before_writes(save: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call ``save`` with every tensor that an operation is about to write to, in compiled and in plain code, on this thread."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        supports_higher_order_operators = True

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True  # else Dynamo would compile nothing

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            for value in _written(func, args, kwargs):
                if made_of_others(value) is not None:
                    return NotImplemented  # its own operations are seen instead
                save(value)
            return func(*args, **kwargs)

    with Watch():  # type: ignore[no-untyped-call]
        yield


@contextlib.contextmanager
def after_operations(seen: Callable[[Any, Sequence[Any], dict[str, Any], Any], None]) -> Iterator[None]:
    """Call ``seen`` after every operation on this thread, with the operator, its arguments and what it returned."""
    with _after_operations()(seen):
        yield


@functools.cache
def _after_operations() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class After(TorchDispatchMode):
        def __init__(self, seen: Any) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.seen = seen

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            self.seen(func, args, kwargs or {}, out)
            return out

    return After


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes to. A higher-order operator in a compiled graph writes to nothing from outside."""
    if not isinstance(func, torch._ops.OpOverload):
        return []
    found: list[Any] = []
    for place, name in _written_places(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        found += value if isinstance(value, list | tuple) else [value]
    return [value for value in found if isinstance(value, torch.Tensor)]


@functools.cache
def _written_places(func: Any) -> list[tuple[int, str]]:
    def writes(argument: Any) -> bool:
        # Old batch norms update running statistics and do not say so.
        declared = argument.alias_info is not None and argument.alias_info.is_write
        return declared or argument.name in ("running_mean", "running_var")

    return [(place, argument.name) for place, argument in enumerate(func._schema.arguments) if writes(argument)]


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Where a tensor keeps its numbers: nowhere on the meta device, in several places for a class made of other tensors."""
    if (inner := made_of_others(tensor)) is not None:
        return [storage for name in inner for storage in storages_of(getattr(tensor, name))]
    if tensor.device.type == "meta" or tensor.layout != torch.strided or torch.nn.parameter.is_lazy(tensor):
        return []
    return [tensor.untyped_storage()]


def in_memory(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with addresses that a tensor is, or is made of."""
    if (inner := made_of_others(tensor)) is not None:
        return [part for name in inner for part in in_memory(getattr(tensor, name))]
    return [tensor] if storages_of(tensor) and not is_transformed(tensor) else []


def made_of_others(tensor: Any) -> list[str] | None:
    """Attributes with the tensors that a tensor of a class of its own is made of; None for a tensor that has numbers itself."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if not is_traceable_wrapper_subclass(tensor):
        return None
    # Beside tensors, a distributed one has its mesh there.
    return [name for name in tensor.__tensor_flatten__()[0] if isinstance(getattr(tensor, name), torch.Tensor)]


def tensor_state(tensor: torch.Tensor) -> Callable[[], None]:
    """A function that gives a tensor back the storage, shape, gradient and version that it has now; not its content."""
    if torch.nn.parameter.is_lazy(tensor):
        return _lazy_state(tensor)
    grad, leaf, trained = tensor.grad if tensor.is_leaf else None, tensor.is_leaf, tensor.requires_grad
    alias, version = tensor.detach(), None if tensor.is_inference() else tensor._version

    def restore() -> None:
        if leaf and not tensor._is_view() and tensor.grad_fn is not None:
            tensor.detach_()
        if _place(tensor) != _place(alias):
            tensor.data = alias
        if leaf and tensor.is_leaf:
            if tensor.requires_grad != trained:
                tensor.requires_grad_(trained)
            if tensor.grad is not grad:
                tensor.grad = grad
        if version is not None and tensor._version != version:
            # Autograd compares versions in a backward that the user may still have to run.
            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))

    return restore


def _lazy_state(tensor: torch.Tensor) -> Callable[[], None]:
    """A function that makes a tensor one without a shape again: what gives it one changes its class."""
    kind, empty = type(tensor), tensor.data

    def restore() -> None:
        if type(tensor) is not kind:
            tensor.grad = None
            tensor.data = empty
            tensor.__class__ = kind

    return restore


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    storages = [storage._cdata for storage in storages_of(tensor)]
    strided = tensor.layout == torch.strided
    return (storages, tensor.shape, tensor.dtype, tensor.device, *((tensor.stride(), tensor.storage_offset()) if strided else ()))


def static_address(tensor: torch.Tensor) -> torch.Tensor:
    """Let CUDA graphs of compiled code read a tensor where it is, as they do Parameters and buffers, and not copy it in each call."""
    from torch._dynamo import mark_static_address

    mark_static_address(tensor)
    return tensor


def static_sizes(tensor: torch.Tensor) -> None:
    """Have Dynamo take no size of a tensor for one that changes, whatever the user says of sizes; also while it traces, where
    ``torch._dynamo.mark_static`` is for what is traced."""
    tensor._dynamo_static_indices = set(range(tensor.dim()))  # type: ignore[attr-defined]
    tensor._has_dynamo_dim_marking = True  # type: ignore[attr-defined]


def has_static_address(node: torch.fx.Node) -> bool:
    """Whether an input of a graph from Dynamo is a Parameter, a buffer or another tensor that a module has."""
    return "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})


def on_cpu(op: Any, *args: Any) -> Any:
    """What is registered for CPU tensors now; a call may find what was there before, since Python's dispatcher remembers its answers."""
    return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args)
