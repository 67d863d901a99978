"""moefuse as a dynamo backend of Hugging Face accelerate, and so of transformers' Trainer.

accelerate takes the names of an enum for its backends. With moefuse imported, before or after accelerate, ``"moefuse"`` is one of them::

    Trainer(model, TrainingArguments(..., torch_compile_backend="moefuse"))
    Accelerator(dynamo_backend="moefuse")
    Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="moefuse", options={"strict": True}))

and so is the environment variable ``ACCELERATE_DYNAMO_BACKEND=moefuse``. The enum looks the name up by its ``_missing_``: iterating over
it, and accelerate's menus and command line, show accelerate's own names only. What is pickled with this member in it can be read where
moefuse is imported. Importing this module does :func:`install`.
"""

from __future__ import annotations

from typing import Any

try:
    from accelerate.utils.dataclasses import DynamoBackend
except ImportError as error:
    raise ImportError("moefuse.integrations.accelerate needs the package accelerate: pip install accelerate") from error

NAME = "MOEFUSE"
_HOOK = "_missing_"
_replaced: list[Any] = []
"""While installed: the lookup that the enum had of its own, or None."""


def install() -> None:
    """Make ``DynamoBackend("MOEFUSE")`` a member. Does nothing where accelerate knows the name by itself, or when done already."""
    if NAME in DynamoBackend:
        return
    # As Enum makes its members: a string, since DynamoBackend is one, with the two attributes that `name` and `value` read.
    member: Any = str.__new__(DynamoBackend, NAME)
    member._name_ = member._value_ = NAME
    before: Any = getattr(DynamoBackend, _HOOK)

    def missing(cls: Any, value: object) -> Any:
        return member if value == NAME else before(value)

    _replaced.append(vars(DynamoBackend).get(_HOOK))
    setattr(DynamoBackend, _HOOK, classmethod(missing))
    # Some releases of Python 3.11 pickle a member as an attribute of its class.
    setattr(DynamoBackend, NAME, member)


def uninstall() -> None:
    """Take back what :func:`install` did. Members that somebody still holds keep their value."""
    if not _replaced:
        return
    own = _replaced.pop()
    if own is None:
        delattr(DynamoBackend, _HOOK)
    else:
        setattr(DynamoBackend, _HOOK, own)
    delattr(DynamoBackend, NAME)


install()
