"""Generated loops that depend on data: what is a mixture of experts is one graph and fused, and nothing ever computes anything else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, event, given, reject, settings, strategies as st
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.torch_version import TorchVersion

import moefuse
from moefuse import Options
from moefuse.diagnosis import trial
from moefuse.report.report import FusionReport
from tests.cpu.capture_case import Packed, Seen, call, capturing, plain, same
from tests.programs import generated
from tests.programs.generated import Loop
from tests.programs.loops import KINDS, H, logits_for
from tests.strategies import PHASES, THOROUGH

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(TorchVersion(torch.__version__) < (2, 12), reason="Dynamo of torch 2.11 breaks more of these graphs"),
]

EXAMPLES = settings().max_examples if THOROUGH else 2


def some(names: dict[str, str] | dict[str, tuple[str, ...]]) -> st.SearchStrategy[str]:
    return st.sampled_from(sorted(names))


PLAIN_IDS = st.just("topk")
RARE = st.sampled_from((False, False, False, True))


def rows_loops(twists: st.SearchStrategy[str], ids: st.SearchStrategy[str] = PLAIN_IDS) -> st.SearchStrategy[Loop]:
    """Loops over experts that select rows."""
    return st.builds(
        Loop,
        over=some(generated.OVER),
        mask=some(generated.MASKS),
        weigh=some(generated.WEIGHS),
        by_slot=RARE,
        behind=RARE,
        idle=RARE,
        hit=some(generated.HITS),
        skip=some(generated.SKIPS),
        gather=some(generated.GATHERS),
        add=some(generated.ADDS),
        store=some(generated.STORES),
        init=some(generated.INITS),
        rebind=some(generated.REBINDS),
        between=some(generated.BETWEEN),
        counter=some(generated.COUNTERS),
        tokens=st.sampled_from((5, 5, 5, 1)),
        around_expert=some(generated.CONTEXTS),
        around_loop=some(generated.CONTEXTS),
        twist=twists,
        ids=ids,
        laid=some(generated.LAID),
    ).filter(generated.sensible)


def cut_loops(twists: st.SearchStrategy[str], ids: st.SearchStrategy[str] = PLAIN_IDS) -> st.SearchStrategy[Loop]:
    """Loops over pieces of sorted slots."""
    return st.builds(
        Loop,
        cut=some(generated.CUTS),
        counts=some(generated.COUNTS),
        order=some(generated.ORDERS),
        skip=some(generated.CUT_SKIPS),
        rows=some(generated.ROWS),
        add=st.sampled_from([*sorted(generated.ADDS), "append", "append", "fill"]),
        store=some(generated.STORES),
        init=some(generated.INITS),
        rebind=some(generated.REBINDS),
        between=some(generated.BETWEEN),
        counter=some(generated.COUNTERS),
        tokens=st.sampled_from((5, 5, 5, 1)),
        around_expert=some(generated.CONTEXTS),
        around_loop=some(generated.CONTEXTS),
        twist=twists,
        ids=ids,
    ).filter(generated.sensible)


def compare(loop: Loop, *, verify: str, grad: bool, flags: bool = False) -> Seen:
    """Outputs, gradients, inputs and Python's state for routings that leave different experts without tokens.

    ``flags``: the user has switched both of Dynamo's capture flags on, with which some programs cannot be compiled at all.
    """
    if not flags:
        return _compare(loop, plain(verify=verify), grad)
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        try:
            return _compare(loop, plain(verify=verify), grad)
        except GuardOnDataDependentSymNode as error:
            with pytest.raises(type(error)):
                _compare(loop, plain(capture=False, enabled=False), grad)
            return Seen()


def _compare(loop: Loop, options: Options, grad: bool) -> Seen:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = generated.layer(loop)()
    twin, seen = copy.deepcopy(model), Seen()
    # Values that are computed again are seen where something computes them again.
    behind = "aot_eager_decomp_partition" if loop.twist in generated.COMPUTED_AGAIN and grad else "eager"
    compiled = torch.compile(Packed(model), backend=capturing(seen, options, behind))
    for kind in KINDS:
        x, logits = torch.randn(loop.tokens, H), logits_for(kind, loop.tokens)
        try:
            expected = call(twin, twin, x, logits, grad=grad)
        except Exception:  # a twist that is no program at all for this routing, or ids that an operation does not take
            if loop.ids in generated.WITHIN:
                reject()
            with pytest.raises((RuntimeError, IndexError)):
                call(lambda x, logits: compiled(torch.cat([x, logits], dim=1)), model, x, logits, grad=grad)
            return seen
        assume(torch.isfinite(expected.out).all())
        same(call(lambda x, logits: compiled(torch.cat([x, logits], dim=1)), model, x, logits, grad=grad), expected)
    return seen


@pytest.mark.parametrize("loops", [rows_loops, cut_loops])
def test_a_mixture_of_experts_is_one_graph_and_fused(loops: object) -> None:
    @settings(phases=PHASES, max_examples=EXAMPLES)
    @given(loops(st.just("none")))  # type: ignore[operator]
    def run(loop: Loop) -> None:
        seen = compare(loop, verify=plain().verify, grad=True)
        assert (len(seen.graphs), len(seen.report.fused)) == (1, 1), f"{loop}\n{loop.text}\n{seen.report}"

    run()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loops", [rows_loops, cut_loops])
def test_another_number_of_experts_for_each_token(loops: object) -> None:
    """K is a symbol from its second value on: what is fused for the first is fused for all, and no call takes anything from another."""

    @settings(phases=PHASES, max_examples=EXAMPLES)
    @given(loops(st.just("none")), st.sampled_from(((2, 3, 2), (3, 2, 4, 3))))  # type: ignore[operator]
    def run(loop: Loop, numbers: tuple[int, ...]) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        loop = replace(loop, outside=True)
        model, seen, done = generated.layer(loop)(), Seen(), []
        compiled = torch.compile(model, backend=capturing(seen))
        with torch.no_grad():
            for top_k in numbers:
                weights, ids = logits_for("random", 5).softmax(-1).topk(top_k)
                x = torch.randn(5, H)
                torch.testing.assert_close(compiled(x, weights, ids), model(x, weights, ids), rtol=1e-5, atol=1e-5)
                done.append(len(seen.report.fused))
        assert done[0] == 0 or done[-1] == len(set(numbers)), f"{loop}\n{loop.text}\n{seen.report}"
        event("fused" if done[0] else "not fused")

    run()


@pytest.mark.parametrize("loops", [rows_loops, cut_loops])
def test_what_only_looks_like_one_computes_what_it_says(loops: object) -> None:
    """Without the verification too, which would catch what the facts get wrong."""
    names = generated.twists(cut=loops is cut_loops)

    @settings(phases=PHASES, max_examples=EXAMPLES)
    @given(loops(st.sampled_from(names)), st.booleans(), st.booleans(), st.booleans())  # type: ignore[operator]
    def run(loop: Loop, verified: bool, grad: bool, flags: bool) -> None:
        event(loop.twist)
        compare(loop, verify=plain().verify if verified else "off", grad=grad, flags=flags)

    run()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loops", [rows_loops, cut_loops])
def test_ids_of_no_expert_mean_what_the_program_says(loops: object) -> None:
    """Ids below zero, beyond the last expert, twice the same, or cast: eager's result, or an error where eager has one."""

    @settings(phases=PHASES, max_examples=2 * EXAMPLES)
    @given(loops(st.just("none"), some(generated.IDS)), st.booleans(), st.booleans())  # type: ignore[operator]
    def run(loop: Loop, verified: bool, grad: bool) -> None:
        event(loop.ids)
        compare(loop, verify=plain().verify if verified else "off", grad=grad)

    run()


FOUND = {
    "every expert assigns, in a loop that is traced for one of them": Loop(
        "where", add="index_put_", gather="select", skip="numel", twist="assigns"
    ),
}
"""What a search found: computed wrongly once, without the verification."""


def outcome(run: Callable[[], FusionReport | None]) -> tuple[object, ...]:
    """What a compilation says: how many regions are fused, the codes of others; or its error."""
    torch._dynamo.reset()
    try:
        report = run()
    except Exception as error:
        return (type(error).__name__,)
    assert report is not None
    return len(report.fused), sorted(skipped.code for skipped in report.skipped)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("loops", [rows_loops, cut_loops])
def test_explain_says_what_the_backend_does(loops: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the backend but Inductor's code generation, which neither refuses nor fuses anything."""
    names = ["none", *generated.twists(cut=loops is cut_loops)]
    monkeypatch.setattr(trial, "later_sizes", lambda _: [])

    @settings(phases=PHASES, max_examples=EXAMPLES)
    @given(loops(st.sampled_from(names)), st.booleans())  # type: ignore[operator]
    def run(loop: Loop, grad: bool) -> None:
        torch.manual_seed(0)
        model, both = Packed(generated.layer(loop)()), torch.cat((torch.randn(5, H), logits_for("random", 5)), dim=1)

        def compiled() -> FusionReport | None:
            torch.compile(copy.deepcopy(model), backend="moefuse")(both)
            return moefuse.last_report()

        with torch.set_grad_enabled(grad):
            expected = outcome(compiled)
            assert outcome(lambda: moefuse.explain(model, both)) == expected, f"{loop}\n{loop.text}"

    run()


@pytest.mark.parametrize("loop", FOUND.values(), ids=FOUND)
def test_what_a_search_found(loop: Loop) -> None:
    @settings(phases=PHASES, max_examples=1)
    @given(st.just(loop))
    def run(loop: Loop) -> None:
        compare(loop, verify="off", grad=False)

    run()
