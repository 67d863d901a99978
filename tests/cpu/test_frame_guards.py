"""Guards that ask functions of ours."""

from types import SimpleNamespace
from typing import Any

from torch._guards import GuardsSet

from moefuse.capture.dynamo import guards


def test_what_brings_things_in_step_is_asked_before_what_looks_at_them() -> None:
    """torch has an order of its own, and in it those of a frame that are about no value are by the line of the function that makes them."""
    asked: list[str] = []
    output: Any = SimpleNamespace(guards=GuardsSet())
    for text, first in (("a relation", False), ("in step", True), ("hooks", False)):
        guards.ask(output, lambda _: True, text, first)
    root = SimpleNamespace(add_lambda_guard=lambda check, texts, *stack: asked.extend(texts))
    for guard in sorted(output.guards):
        guard.create_fn(SimpleNamespace(guard_manager=SimpleNamespace(root=root)), guard)
    assert asked == ["in step", "a relation", "hooks"]
