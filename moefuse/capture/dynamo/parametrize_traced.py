"""What Dynamo traces in place of functions of ``torch.nn.utils.parametrize``; see ``registering``.

They make the same objects and call the same code as torch's. What they leave out has no effect but to stop Dynamo: a Parameter is not set
to itself, and the module's class and its Parameters stay as they are, since ``parametrized`` answers for the module.
"""

from __future__ import annotations

from types import TracebackType

from torch import Tensor, nn
from torch.nn.utils import parametrize


class OneTensor(parametrize.ParametrizationList):
    """``module.parametrizations[name]`` of a tensor that is its own ``original``, as it is where nothing has a ``right_inverse``."""

    def __init__(self, parametrization: nn.Module, original: Tensor, unsafe: bool) -> None:
        nn.ModuleList.__init__(self, [parametrization])
        self.unsafe = unsafe
        self.is_tensor = True
        self.ntensors = 1
        parametrize._register_parameter_or_buffer(self, "original", original)


def caches() -> bool:
    """Whether values of parametrisations are kept, by somebody around this."""
    return parametrize._cache_enabled > 0


def register(module: nn.Module, name: str, parametrization: nn.Module, unsafe: bool) -> nn.Module:
    """``module.parametrizations[name]`` for a tensor of a module."""
    parametrization.train(module.training)
    return OneTensor(parametrization, getattr(module, name), unsafe)


def check(made: nn.Module, original: Tensor) -> None:
    """torch's check of a parametrisation, and its errors."""
    value = made()
    if not isinstance(value, Tensor):
        raise ValueError(f"A parametrization must return a tensor. Got {type(value).__name__}.")
    if value.dtype != original.dtype:
        raise ValueError(
            "Registering a parametrization may not change the dtype of the tensor, unless `unsafe` flag is enabled.\n"
            f"unparametrized dtype: {original.dtype}\n"
            f"parametrized dtype: {value.dtype}"
        )
    if value.shape != original.shape:
        raise ValueError(
            "Registering a parametrization may not change the shape of the tensor, unless `unsafe` flag is enabled.\n"
            f"unparametrized shape: {original.shape}\n"
            f"parametrized shape: {value.shape}"
        )


def new_dict() -> nn.ModuleDict:
    """``module.parametrizations``, empty."""
    return nn.ModuleDict()


def put(parametrizations: nn.ModuleDict, name: str, made: nn.Module) -> None:
    parametrizations[name] = made


def drop(parametrizations: nn.ModuleDict, name: str) -> None:
    del parametrizations[name]


def value_of(made: nn.Module) -> Tensor:
    """The parametrised tensor."""
    return made()  # type: ignore[no-any-return]


def opened() -> None:
    """Answered by ``registering``: from here on values are kept."""


def closed() -> None:
    """Answered by ``registering``: the innermost block that keeps values ends."""


class Cached:
    """``parametrize.cached()``."""

    def __enter__(self) -> None:
        opened()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        closed()


def cached() -> Cached:
    return Cached()
