"""Programs as people write them: each is fused as one region and equals the reference, values and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.programs import catalogue, check
from tests.programs.bodies import FORMS
from tests.programs.program import Body, Dense, Noise, Program, Routing, Slots, Sorted, Store, invalid
from tests.strategies import FEW, PHASES, SPELLINGS, programs

_FULL = catalogue.PROGRAMS[::14]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda cls: cls.__name__.lower())
def test_any_program(spelling: type[Any]) -> None:
    @settings(phases=PHASES, max_examples=FEW, suppress_health_check=list(HealthCheck))
    @given(programs((spelling,)))
    def run(p: Program) -> None:
        check.check_program(p)

    run()


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("entry", catalogue.PROGRAMS, ids=lambda entry: entry.name)
def test_catalogue(entry: catalogue.Entry) -> None:
    outcome = check.check_program(entry.program)
    assert outcome.fused[0].domain == entry.domain, entry.why
    assert outcome.fused[0].tier == entry.tier, entry.why


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("entry", _FULL, ids=lambda entry: entry.name)
def test_through_inductor(entry: catalogue.Entry) -> None:
    check.check_program(entry.program, full=True)


@pytest.mark.every_value
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("gating", ["plain", "merged"])
@pytest.mark.parametrize("form", range(FORMS["leaky_by_hand"]))
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda cls: cls.__name__.lower())
def test_conditions_in_every_domain(spelling: type[Any], form: int, gating: Any) -> None:
    outcome = check.check_program(Program(spelling(), body=Body(gating=gating, activation="leaky_by_hand", form=form), tokens=(9,)))
    assert [f.tier for f in outcome.fused] == ["grouped"]


_CANCELS = {
    "scale of a normed row": Program(
        Slots(rows="repeat", product="einsum", weight_on="input"),
        Routing("inputs", "clamp", 2.5, upcast=True, router_bias=True),
        Body(gating="plain", activation="identity", extra="out_norm"),
        Store(layout=("in-out", "out-in"), linear=3),
        Noise("contiguous", "method", "none_index", "flatten", logits_out=True, shared="gated", pre_norm=True),
        tokens=(3, 1),
        seed=1,
    ),
    "one hidden feature before a norm": Program(
        Dense(weight_on="input"),
        Routing("sort_slice", "div", 2.5),
        Body(gating="split", activation="relu2", extra="out_norm"),
        tokens=(4,),
        experts=3,
        top_k=3,
        seed=3,
    ),
    "weight over itself": Program(
        Sorted("argsort", "div_floor", "searchsorted", "private", "index_copy_", "after"),
        Routing("max", "clamp", router_bias=True),
        Body(gating="plain", activation="tanh", form=1, bias=True),
        Store(layout=("in-out", "in-out")),
        Noise("clone", "method", "view"),
        tokens=(1, 1),
        top_k=1,
        inter=8,
        dtype="bfloat16",
    ),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("program", _CANCELS.values(), ids=_CANCELS)
def test_gradients_that_cancel(program: Program) -> None:
    """All rounding: eager's own error at one point is luck."""
    check.check_program(program)


@pytest.mark.usefixtures("fresh_dynamo")
def test_no_rounding_excuses_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    program = _CANCELS["scale of a normed row"]
    execute = check.execute

    def off(call: Any, model: Any, inputs: Any, **options: Any) -> check.Run:
        found = execute(call, model, inputs, **options)
        return found if call is model else replace(found, grads={name: g * 1.001 for name, g in found.grads.items()})

    monkeypatch.setattr(check, "execute", off)
    with pytest.raises(AssertionError, match=r"grad of .*: error"):
        check.check_program(program)


def test_catalogue_is_sound() -> None:
    names = [entry.name for entry in catalogue.PROGRAMS]
    assert len(names) == len(set(names)) >= 40
    assert [entry.name for entry in catalogue.PROGRAMS if invalid(entry.program)] == []
