"""Expressions whose result shares memory with a tensor, as torch says: by schema, and by calling everything and comparing storages."""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor

NAMES: dict[str, Any] = {"torch": torch, "np": numpy}
"""What expressions may name."""

ARGUMENTS = (
    "", "0", "1", "-1", "0, 0", "0, 1", "-1, 0", "0, 0, 1", "0, 1, 1", "{t}", "{t}.shape", "{t}.shape, {t}.stride()", "[0, 1]", "(1, 0)",
    "[-1]", "-1, (-1, 1)", "{t}.dtype", "'cpu'",
)  # fmt: skip
"""What functions and methods are tried with."""

BY_TYPE: dict[str, tuple[str, ...]] = {
    "int": ("0", "1", "-1"),
    "List[int]": ("{t}.shape", "{t}.stride()", "[0, 1]", "[-1]"),
    "Tensor": ("{t}",),
    "bool": ("False",),
    "Device": ("torch.device('cpu')",),
}
"""What operators are tried with: a wrong number for a dtype stops the process."""

WRITTEN_BY_HAND = (
    "{t}[...]", "{t}[:]", "{t}[None]", "{t}[None][0]", "{t}[0]", "{t}[-1]", "{t}[1:]", "{t}[::2]", "{t}[..., 0]", "{t}[..., :1]",
    "{t}[..., None]", "{t}[0, ...]", "list({t})[0]", "[*{t}][-1]", "next(iter({t}))", "(+{t})", "{t}.data.data",
    "{t}.expand(2, *{t}.shape)[1]", "torch.from_numpy({t}.detach().numpy())", "torch.as_tensor({t}.detach().cpu().numpy())",
    "torch.from_numpy(np.asarray({t}.detach()))", "torch.from_numpy({t}.detach().numpy().T)",
    "torch.from_numpy({t}.detach().numpy().reshape(-1))", "torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack({t}.detach()))",
    "torch.frombuffer({t}.detach().numpy(), dtype={t}.dtype)", "torch.split({t}, 1)[0]", "{t}.unbind(0)[0].unbind(0)[0]",
    "{t}.view({t}.shape).as_strided({t}.shape, {t}.stride())", "torch.nn.Parameter({t}.detach(), requires_grad=False)",
    "torch.nn.Identity()({t})", "torch.nn.functional.dropout({t}, 0.0)", "torch.nn.functional.dropout({t}, 0.5, False)",
    "torch.nn.Flatten(0)({t})", "{t}.to('cpu', {t}.dtype)", "{t}.type({t}.type())", "torch.ops.aten.lift_fresh({t})",
    "{t}.view(torch.int64)", "{t}.detach().requires_grad_(False)", "{t}.narrow(-1, 0, 1).squeeze(-1)",
)  # fmt: skip
"""Ways that no single call stands for."""

_NEVER = frozenset(("backward", "compile", "pin_memory", "is_pinned", "cuda", "xpu", "ipu", "mtia", "hpu", "record_stream", "save"))
_UNSAFE = "unsafe_"
"""What torch names so may not be written to, says its documentation; AOTAutograd alone loses such writes."""


def shares(base: Tensor, value: object) -> bool:
    """Whether a value is a tensor with elements in the memory of ``base``."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or not value.numel():
        return False
    storage = value.untyped_storage()
    return storage.data_ptr() == base.untyped_storage().data_ptr() and _end(value) <= storage.nbytes()


def _end(value: Tensor) -> int:
    """The byte behind the last one that a view reaches: some operators take any strides, and a write stops the process later."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return int((value.storage_offset() + last + 1) * value.element_size())


def evaluated(expr: str, **names: Tensor) -> Any:
    """The value of an expression; None where it has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return eval(expr, {**NAMES, **names})
        except Exception:
            return None


def _computes(name: str) -> bool:
    """Whether a name is an operator that never returns what it was given: not by its schema, and not by being made of others."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    return not any(_may_alias(getattr(packet, overload)) for overload in packet.overloads())


def _may_alias(operator: Any) -> bool:
    """By its schema, or because it is made of other operators, of which its schema says nothing."""
    if any(r.alias_info is not None and not r.alias_info.is_write for r in operator._schema.returns):
        return True
    try:
        return bool(operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))
    except RuntimeError:  # TorchScript's own, of numbers
        return False


def _left_out(name: str) -> bool:
    """Whether a public name is no view to try: private, in place, a copy, or not to be called here."""
    return name.startswith(("_", _UNSAFE)) or name.endswith("_") or name in _NEVER or _computes(name)


def _methods() -> Iterator[tuple[str, str]]:
    """(name, expression): methods and attributes of tensors."""
    for name in dir(Tensor):
        if _left_out(name):
            continue
        if callable(getattr(Tensor, name)):
            yield from ((name, f"{{t}}.{name}({given})") for given in ARGUMENTS)
        else:
            yield name, "{t}." + name


def _functions(methods: dict[str, dict[str, None]]) -> Iterator[tuple[str, str]]:
    """(name, expression): functions; those that are methods too are tried with what was a view there."""
    for name in dir(torch):
        value = getattr(torch, name)
        # A setter may take a tensor, and then every test behind this one has other settings: set_printoptions does.
        if not callable(value) or isinstance(value, type) or _left_out(name) or name.startswith(("set_", "use_")):
            continue
        before = [expr.split("(", 1)[1].rsplit(")", 1)[0] for expr in methods.get(name, ()) if "(" in expr]
        for given in before if hasattr(Tensor, name) else ARGUMENTS:
            yield name, f"torch.{name}({', '.join(filter(None, ('{t}', given)))})"


def _operators() -> Iterator[tuple[str, str]]:
    """(name, expression): every operator whose schema says that its result may alias its first argument."""
    for schema in torch._C._jit_get_all_schemas():
        if not schema.name.startswith("aten::") or not schema.arguments or not _aliases(schema):
            continue
        name = schema.name.removeprefix("aten::")
        if name.startswith(_UNSAFE):
            continue
        rest = [a for a in schema.arguments[1:] if not a.has_default_value()]
        tried = [("torch.float64", "{t}.dtype") if a.name == "dtype" else BY_TYPE.get(str(a.type), ()) for a in rest]
        for values in itertools.product(*tried):
            given = [f"{a.name}={v}" if a.kwarg_only else v for a, v in zip(rest, values, strict=True)]
            yield name, f"torch.ops.aten.{name}.{schema.overload_name or 'default'}({', '.join(['{t}', *given])})"


def _aliases(schema: Any) -> bool:
    first = schema.arguments[0].alias_info
    return first is not None and not first.is_write and any(r.alias_info is not None for r in schema.returns)


def _picked(base: Tensor, value: object) -> str | None:
    """What to append to an expression so that it is one view: nothing, or an index into a list of them."""
    if shares(base, value):
        return ""
    if isinstance(value, tuple | list):
        return next((f"[{i}]" for i, item in enumerate(value) if shares(base, item)), None)
    return None


@functools.cache
def views() -> dict[str, tuple[str, ...]]:
    """Expressions of ``{t}`` by the name of what they call; each is a view of a matrix or of a vector, of numbers or of integers."""
    samples = (torch.rand(5, 2, dtype=torch.float64), torch.arange(3))
    found: dict[str, dict[str, None]] = {}

    def keep(forms: Iterator[tuple[str, str]]) -> None:
        for name, expr in forms:
            for sample in samples:
                base = sample.clone()
                index = _picked(base, evaluated(expr.replace("{t}", "t"), t=base))
                if index is not None:
                    found.setdefault(name, {})[expr + index] = None

    keep(_methods())
    keep(_functions({name: dict(exprs) for name, exprs in found.items()}))
    keep(_operators())
    return {**{name: tuple(exprs) for name, exprs in found.items()}, **{expr: (expr,) for expr in WRITTEN_BY_HAND}}


def chain(rng: random.Random, samples: tuple[Tensor, ...], steps: int) -> list[str]:
    """Expressions of ``{t}``, each a view of the one before, whatever the number of tokens; empty if nothing fits.

    Args:
        samples: the tensor to view, at several numbers of tokens.
    """
    table, found = views(), []
    now = samples
    for _ in range(steps):
        for _ in range(20):
            expr = rng.choice(table[rng.choice(list(table))])
            after = tuple(evaluated(expr.replace("{t}", "t"), t=t) for t in now)
            if all(shares(t, a) for t, a in zip(samples, after, strict=True)):
                found.append(expr)
                now = after
                break
    return found


def applied(exprs: list[str], name: str) -> str:
    """The expression of a chain of views."""
    for expr in exprs:
        name = expr.replace("{t}", name if name.isidentifier() or _closed(name) else f"({name})")
    return name


def _closed(text: str) -> bool:
    return text[-1] in ")]" or text.replace(".", "").replace("_", "").isalnum()
