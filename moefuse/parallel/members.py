"""What modules inside of an expert in a list know of themselves: the list holds their weights, wherever they are in the model.

The row of an expert goes with its modules. So a list may be sorted, cut or put into another one, and experts may change places: what is
read, saved, loaded and put together again is found by the module, and never by its place.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from moefuse.errors import ParallelError
from moefuse.parallel import views

_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")
"""What wrappers put into the names of a state and take out of its keys."""

HOLDER = "_moefuse_holder"
"""The attribute of an expert, and of a module in it whose Parameters were taken: the list, in a dictionary, so that it is no child."""
MEMBER = "_moefuse_member"
"""The attribute of such a module's class that has its :class:`Member`: modules at one place in experts of one number share it."""


@dataclass(frozen=True)
class Member:
    """A module in an expert; an attribute of its class.

    Attributes:
        expert: whose rows of the list's Parameters it reads.
        inner: its path from the expert.
        names: of its own Parameters that were taken, the path from the expert.
        order: of all its Parameters, as they were.
    """

    expert: int
    inner: str
    names: Mapping[str, str]
    order: tuple[str, ...]


def member_of(module: nn.Module) -> Member | None:
    """What a module knows of itself, if a list has its Parameters."""
    return getattr(type(module), MEMBER, None) if HOLDER in vars(module) else None


def holder_of(module: nn.Module) -> nn.Module:
    """The list that has the weights of an expert, or of a module in it."""
    found: nn.Module = vars(module)[HOLDER][""]
    return found


def members_of(root: nn.Module) -> Iterator[tuple[str, nn.Module, Member]]:
    """All of a model by the prefix of their keys; one that has several names under each."""
    for name, module in root.named_modules(remove_duplicate=False):
        member = member_of(module)
        if member is not None:
            yield unwrapped(f"{name}."), module, member


def unwrapped(prefix: str) -> str:
    """The keys of a state have no wrappers in them."""
    for wrapper in _WRAPPERS:
        prefix = prefix.replace(wrapper, "")
    return prefix


def check_whole(member: Member, prefix: str, what: str, layer: str) -> None:
    """Raises where a state is of an expert alone, or of a part of one: other ranks may have its weights."""
    if f"{member.inner}.".lstrip(".").endswith(unwrapped(prefix)):
        raise ParallelError(
            f"{what} of a part of an expert of {layer}, whose weights moefuse.parallelize has put into the list of all of them: "
            "call it on the list or on a module around it"
        )


def freezing(kind: type[nn.Module], layer: Callable[[nn.Module], str]) -> dict[str, Any]:
    """Methods for the class of an expert, and of each module in it with Parameters, that warn of freezing one expert of a ``layer``."""

    def requires_grad_(self: Any, requires_grad: bool = True) -> Any:
        warnings.warn(
            f"requires_grad_({requires_grad}) of an expert of {layer(self)} changes nothing: moefuse.parallelize has put its weights into "
            "the list of all of them. Call it on the list, or on plan.parameters",
            stacklevel=2,
        )
        for _, parameter in kind.named_parameters(self):
            parameter.requires_grad_(requires_grad)
        return self

    return {"requires_grad_": requires_grad_}


def keeping(kind: type[nn.Module], layer: Callable[[nn.Module], str]) -> dict[str, Any]:
    """A method for the class of a module in an expert of a ``layer``: it gets no Parameter in place of one that the list has."""

    def register_parameter(self: Any, name: str, parameter: Any) -> None:
        member = member_of(self)
        if member is not None and name in member.names:
            refuse_set(self, name, layer(self))
        kind.register_parameter(self, name, parameter)

    return {"register_parameter": register_parameter}


def refuse_set(module: nn.Module, name: str, layer: str) -> NoReturn:
    """Raises where an attribute is set of which the list of experts has the weights."""
    raise ParallelError(
        f"{name} of {type(module).__name__} in an expert of {layer} was set, and is a row of what the list of experts has on one rank: "
        "set it before moefuse.parallelize, or load a state_dict"
    )


_SHARED = (
    "parameters() of one expert of {layer} has all experts' weights, which moefuse.parallelize has put into the list of all of them: what "
    "is done with them for each expert is done with all of them as often. Take those of the list; attributes of an expert are its own"
)


def listing(
    kind: type[nn.Module], layer: Callable[[nn.Module], str], stack: Callable[[nn.Module, str], nn.Parameter]
) -> dict[str, Any]:  # fmt: skip
    """A method for the class of an expert, and of each module in it with Parameters: asked for them itself, it has the list's [E, ...].

    So whoever freezes adapters by the modules that they were in (PEFT) freezes them, all experts' at once. A model has them once, of the
    list. Who updates or adds them up expert by expert would do so E times, and is warned.

    Args:
        layer: the name of an expert's layer.
        stack: of a list, its Parameter at a path from an expert.
    """

    def named_parameters(self: Any, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:
        yield from kind.named_parameters(self, prefix, recurse, remove_duplicate)
        # Who walks over all modules himself asks each for its own alone (DDP does).
        for name, module in self.named_modules(prefix=prefix) if recurse else ():
            member = member_of(module)
            if member is not None and member.names:
                warnings.warn(_SHARED.format(layer=layer(module)), stacklevel=3)
            for own, path in member.names.items() if member is not None else ():
                yield f"{name}.{own}".lstrip("."), stack(holder_of(module), path)

    return {"named_parameters": named_parameters}


def copying(kind: type[nn.Module], row: Callable[[nn.Module, str, int], nn.Parameter]) -> dict[str, Any]:
    """A method for these classes: a copy without its list is a module of its own, with full weights, as it is on one process.

    Args:
        row: of a list, what one expert has at a path, in full; a collective call.
    """

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        if id(holder_of(self)) in memo:
            return _copied(self, memo)
        made = _copied(self, memo, leave_out=HOLDER)
        made.__class__ = views.original(self)
        member = member_of(self)
        if member is not None:
            taken = {own: row(holder_of(self), path, member.expert) for own, path in member.names.items()}
            own = {**made._parameters, **taken}
            made._parameters.clear()
            made._parameters.update({name: own.pop(name) for name in member.order if name in own} | own)
        return made

    return {} if hasattr(kind, "__deepcopy__") else {"__deepcopy__": deepcopy}


def _copied(module: nn.Module, memo: dict[int, Any], leave_out: str = "") -> Any:
    """As ``copy.deepcopy`` copies what has no opinion on it."""
    reduced: Any = module.__reduce_ex__(4)
    make, arguments, state = reduced[:3]
    made = make(*arguments)
    memo[id(module)] = made
    made.__setstate__(copy.deepcopy({name: value for name, value in state.items() if name != leave_out}, memo))
    return made
