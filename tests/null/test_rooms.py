"""Rooms stand on floors: no import circles, no import of a higher floor, and none hidden in a function without its reason."""

from __future__ import annotations

from tests.house import FLOORS, PACKAGE, arrows, arrows_up, circles, imported, imports, room, rooms_of

TOP = 12
"""Files at the top of the package, each named by what a reader looks for."""

UP = {
    "passes.rules.rows.index -> passes.rules.sums.segments": "sorted rows are cut into experts' segments, which sums/ puts together again",
    "passes.rules.rows.contraction -> passes.rules.sums.reduce": "a product over the slots of a token sums them",
}
"""Imports of what is on a higher floor, and why."""

LATE = {
    "__init__": "the entry for Inductor's passes is loaded by who asks for it",
    "api": "moefuse.warmup alone needs the tuner",
    "backend": "loaded with the first graph: Dynamo imports every backend that is registered",
    "cache": "the key alone needs what was measured",
    "capture.dummies": "a pass of experts without tokens alone asks the passes",
    "capture.bins": "a count alone asks the passes",
    "capture.attempt": "a branch that Dynamo stops at alone asks the passes",
    "capture.ledger": "a refusal alone asks the passes",
    "capture.scopes": "a value of a parametrisation alone asks the passes",
    "config": "options are read before torch is",
    "gains.gains": "a page alone needs what draws it",
    "integrations.transformers_ep": "a model that is loaded with it alone needs torch.distributed's tensors",
    "parallel.load": "a model of transformers alone needs transformers' mapping",
    "passes.lower.workspace_size": "Triton is not there on every machine",
    "pipeline.rewrite": "a broken install of the passes must not break a program",
    "pipeline.settled": "a broken install of the passes must not break a program",
    "report.report": "a page alone needs what draws it",
    "runtime.transports.beside": "Triton is not there on every machine",
    "runtime.transports.symm": "Triton is not there on every machine",
    "tuning.measure.warmup": "Triton is not there on every machine",
    "kernels.triton.tune.worker": "the process says that it is there before it loads Triton",
    "evidence.few_bits": "a layer that was not found alone asks the passes",
    "kernels.triton.host.alone": "a Triton may be without Gluon",
    "kernels.triton.host.packed_specialised": "a Triton may be without Gluon",
    "kernels.triton.host.rounded_specialised": "a Triton may be without Gluon",
    "kernels.triton.host.words": "a Triton may be without Gluon",
    "kernels.triton.host.plan_specialised": "a Triton may be without Gluon",
    "kernels.triton.host.specialised": "a Triton may be without Gluon",
}
"""Modules that import others of moefuse in a function, and why."""


def test_every_room_has_a_floor() -> None:
    assert len(arrows()) > 450, "the links to passes/ and kernels/ are not followed"
    rooms = {room(name) for name in arrows()}
    assert rooms == set(FLOORS), f"without a floor: {sorted(rooms - set(FLOORS))}; not there any more: {sorted(set(FLOORS) - rooms)}"


def test_there_are_no_import_circles() -> None:
    """Imports in functions and for types count, too."""
    assert not circles(arrows()), f"import circles among {sorted(circles(arrows()))}"


def test_rooms_are_in_no_circle() -> None:
    """But for those that a known arrow up closes."""
    straight = {name: {target for target in targets if f"{name} -> {target}" not in UP} for name, targets in arrows().items()}
    assert not circles(rooms_of(straight)), f"circles among the rooms {sorted(circles(rooms_of(straight)))}"


def test_imports_follow_the_floors() -> None:
    found = set(arrows_up(arrows()))
    assert found == set(UP), f"up: {sorted(found - set(UP))}; not there any more: {sorted(set(UP) - found)}"


def test_few_files_are_at_the_top() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= TOP


def test_imports_in_functions_have_a_reason() -> None:
    hidden = {name for name, its in imported().items() if any(inside for _, inside in its)}
    assert hidden == set(LATE), f"without a reason: {sorted(hidden - set(LATE))}; not there any more: {sorted(set(LATE) - hidden)}"


def test_a_circle_is_seen() -> None:
    """What only leads to one, or comes of it, is none."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {"b", "c"}


def test_every_import_is_seen() -> None:
    """Those for types alone and those in functions, of modules and of names in them."""
    text = "if TYPE_CHECKING:\n    from moefuse.api import compile\ndef f():\n    import moefuse.backend\nfrom moefuse import spec"
    assert list(imports(text)) == [("api", False), ("backend", True), ("spec", False)]
