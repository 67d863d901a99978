"""Types of what torch compiles."""

from collections.abc import Callable
from typing import Any

CompiledFn = Callable[..., Any]
