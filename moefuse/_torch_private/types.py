"""Types of what torch compiles, and the trees of Python's containers that it takes."""

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass, _AutoDispatchBelowAutograd as below_autograd
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

CompiledFn = Callable[..., Any]
BatchNorm = torch.nn.modules.batchnorm._BatchNorm

__all__ = [
    "BatchNorm",
    "CompiledFn",
    "DisableTorchFunctionSubclass",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "below_autograd",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]
