"""The model that a command is about: ``MODULE:NAME`` and its inputs."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from moefuse import _torch_private
from moefuse.cli import hugging_face
from moefuse.cli.command import CommandError, doing
from moefuse.cli.words import INPUTS
from moefuse.errors import first_line
from moefuse.machine.logs import unlogged

_WORD = re.compile(r"(?:(?P<dtype>[a-z]\w*):)?(?P<shape>\d+(?:x\d+)*)(?::(?P<below>\d+))?")


def load(name: str, inputs: Sequence[str] | None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The model and what to call it with.

    ``MODULE:NAME``, or ``FILE.py:NAME``, is a class or a function, called without arguments, that gives a model, or a model and its inputs
    as a tuple; or it is a module itself.

    Raises:
        CommandError: there is no such thing, it cannot be called so, or inputs are missing or wrong.
    """
    found = _attribute(name)
    made = found
    if not isinstance(found, torch.nn.Module):
        doing(f"building {name}")
        made = _called(name, found)
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not callable(model):
        raise CommandError(f"{name} gives {type(model).__name__}, not a model")
    if inputs:
        return model, tuple(tensor(word) for word in inputs)
    if given is not None:
        return model, tuple(given) if isinstance(given, tuple | list) else (given,)
    raise CommandError(f"{name} needs inputs. Give --inputs, {INPUTS}; or let {name} return (model, inputs)")


def tensor(word: str) -> torch.Tensor:
    """A random tensor from its description: see :data:`moefuse.cli.words.INPUTS`."""
    match = _WORD.fullmatch(word)
    dtype = getattr(torch, (match["dtype"] if match else None) or "float32", None)
    if match is None or not isinstance(dtype, torch.dtype):
        raise CommandError(f"--inputs {word} is no tensor. Give {INPUTS}")
    shape = [int(size) for size in match["shape"].split("x")]
    if dtype.is_floating_point and match["below"]:
        raise CommandError(f"--inputs {word}: a limit is for integers, and {match['dtype'] or 'float32'} is none")
    try:
        made = torch.randn(shape) if dtype.is_floating_point else torch.randint(0, int(match["below"] or 2), shape)
    except (RuntimeError, ValueError, TypeError) as error:
        raise CommandError(f"--inputs {word} cannot be made: {why(error)}") from error
    return made.to(dtype)


def asked(given: argparse.Namespace) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]:
    """The model that a command line names, its arguments, keyword arguments, and what was changed of a config."""
    if bool(given.model) == bool(given.hf):
        raise CommandError("name one model: MODULE:NAME, or --hf PATH")
    if given.layers < 1:
        raise CommandError(f"--layers {given.layers} leaves nothing: give 1 or more")
    if given.hf:
        model, kwargs, changed = hugging_face.build(given.hf, given.layers)
        return (model, (), kwargs, changed) if not given.inputs else (model, tuple(map(tensor, given.inputs)), {}, changed)
    made, args = load(given.model, given.inputs)
    return made, args, {}, ""


def on_gpu(model: Callable[..., Any], inputs: Any) -> tuple[Callable[..., Any], Any]:
    """The model and its inputs on the CUDA device, if there is one."""
    if not torch.cuda.is_available():
        return model, inputs
    return model.cuda() if isinstance(model, torch.nn.Module) else model, _torch_private.map_tensors(torch.Tensor.cuda, inputs)


@contextlib.contextmanager
def called_with(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """A call of the model. What the log would say is in the report, or in the error.

    Raises:
        CommandError: the call raises.
    """
    try:
        with unlogged("moefuse", _torch_private.FAKES_LOG):
            yield
    except Exception as error:
        shapes = ", ".join(
            f"{v.dtype}{list(v.shape)}".removeprefix("torch.") for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)
        )
        ids = " (ids: --inputs int64:SHAPE:BELOW)" if "indices" in why(error) and "float" in shapes else ""
        raise CommandError(f"the model cannot be called with {shapes or 'these inputs'}: {why(error)}{ids}") from error


def why(error: BaseException) -> str:
    """What a program raised, in one line."""
    error = _torch_private.beneath(error)
    return f"{type(error).__name__}: {first_line(error)}"


def _attribute(name: str) -> Any:
    home, colon, path = name.rpartition(":")
    if not colon or not home or not path:
        raise CommandError(f"{name!r} names nothing to build: give MODULE:NAME, e.g. my_package.model:MyModel")
    value: Any = _imported(home)
    module = value.__name__
    for part in path.split("."):
        if not hasattr(value, part):
            own = (n for n, v in vars(value).items() if callable(v) and getattr(v, "__module__", "") == module)
            raise CommandError(f"{home} has no {path!r}; it has {', '.join(own) or 'nothing of its own'}")
        value = getattr(value, part)
    return value


def _imported(home: str) -> types.ModuleType:
    """A module by its name, or by the path of its file, which then sees what lies beside it, as a program does."""
    file = Path(home)
    of_file = file.suffix == ".py" and file.is_file()
    folder = str(file.resolve().parent) if of_file else ""  # "": as `python -m` has it; the console may not
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _of_file(file) if of_file else importlib.import_module(home)
    except ModuleNotFoundError as error:
        if file.suffix == ".py" and not of_file:
            raise CommandError(f"there is no file {home}") from None
        raise CommandError(f"no module {error.name!r}; run this where `import {error.name if of_file else home}` works") from None
    except Exception as error:
        raise CommandError(f"`import {home}` fails: {why(error)}") from error


def _of_file(file: Path) -> types.ModuleType:
    # Another module may have the name already. Classes are found by the name of their module: it is in sys.modules as any other.
    name = file.stem if file.stem not in sys.modules else f"{file.stem}_"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _called(name: str, factory: Any) -> Any:
    if not callable(factory):
        raise CommandError(f"{name} is of type {type(factory).__name__}: name a model, or a class or a function that gives one")
    try:
        missing = [p.name for p in inspect.signature(factory).parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    except (TypeError, ValueError):
        missing = []
    if missing:
        raise CommandError(f"{name} needs arguments ({', '.join(missing)}): name a function without any that builds the model")
    try:
        return factory()
    except Exception as error:
        raise CommandError(f"{name}() fails: {why(error)}") from error
