"""Hypothesis strategies for mixture-of-experts programs (:class:`tests.programs.Program`)."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from hypothesis import Phase, reject, settings, strategies as st

from tests.programs.bodies import FORMS
from tests.programs.mutations import Mutation
from tests.programs.program import (
    CUSTOM,
    NEEDS_GATE,
    NONZERO_AT_ZERO,
    ON_MASKS,
    SMOOTH,
    Body,
    Dense,
    Filled,
    Masked,
    Noise,
    Program,
    Routing,
    Selected,
    Slots,
    Sorted,
    Store,
    invalid,
)

D = TypeVar("D")
TOKENS: tuple[tuple[int, ...], ...] = ((5,), (1,), (2,), (4,), (13,), (2, 3), (2, 4), (1, 4), (3, 1), (1, 1))
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
THOROUGH = settings().max_examples > 100
FEW = settings().max_examples if THOROUGH else 3
"""Examples of a test that compiles each of them several times."""
PHASES = (*_PHASES, Phase.target, Phase.shrink) if THOROUGH else _PHASES
"""Shrinking a program costs minutes of compilation; its repr is short anyway, so only the deep profile does it."""
DTYPES: tuple[str, ...] = ("float32", "float32", "float32", "bfloat16")
SPELLINGS: tuple[type[Any], ...] = (Selected, Filled, Masked, Slots, Sorted, Dense)


def choices(cls: type[D]) -> st.SearchStrategy[D]:
    """Any instance of a frozen dataclass whose fields are Literals or bools (others keep their default)."""
    hints, drawn = get_type_hints(cls), {}
    for f in fields(cls):  # type: ignore[arg-type]
        hint = hints[f.name]
        if get_origin(hint) is Literal:
            drawn[f.name] = st.sampled_from(get_args(hint))
        elif hint is bool:
            drawn[f.name] = st.booleans()
    return st.builds(cls, **drawn)


def routings() -> st.SearchStrategy[Routing]:
    """Any routing recipe with any of its options, and the ids that it chooses."""
    return st.builds(lambda r, scale: _with(r, scale=scale, ids="chosen"), choices(Routing), st.sampled_from((1.0, 2.5)))


def bodies() -> st.SearchStrategy[Body]:
    """Any expert body, the known and the unknown ones in equal parts."""

    def finish(body: Body, plain_template: bool, form: int) -> Body:
        if plain_template:
            body = _with(body, extra="none", activation="silu" if body.activation in CUSTOM else body.activation)
        if body.gating != "merged":
            body = _with(body, split="chunk", up_first=body.up_first and body.gating == "interleaved")
        if (body.gating == "plain" and body.activation in NEEDS_GATE) or (body.gating == "split" and body.activation == "gate_only"):
            body = _with(body, activation="gelu")
        return _with(body, form=form % FORMS[body.activation])

    return st.builds(finish, choices(Body), st.sampled_from((True, True, False)), st.integers(0, 5))


def stores() -> st.SearchStrategy[Store]:
    """Any storage, layout and way of reading."""
    layouts = st.sampled_from((("out-in", "out-in"), ("in-out", "in-out"), ("in-out", "out-in")))
    return st.builds(lambda s, layout, form: _with(s, layout=layout, linear=form), choices(Store), layouts, st.integers(0, 4))


def _with(data: D, **changes: Any) -> D:
    values = {f.name: getattr(data, f.name) for f in fields(data)}  # type: ignore[arg-type]
    return type(data)(**(values | changes))


def _fit_selected(s: Selected) -> Selected:
    """A way to combine that goes with how the rows are found."""
    boolean = s.find in ("any_mask", "top1_mask", "slot_loop")
    if boolean and s.combine not in ON_MASKS:
        s = _with(s, combine="iadd")
    if boolean:
        s = _with(s, gather="masked_select" if s.gather == "masked_select" else "index", weight_on="output")
    elif s.combine in ON_MASKS and s.combine != "iadd":
        s = _with(s, combine="index_add_")
    if not boolean and s.gather == "masked_select":
        s = _with(s, gather="index")
    if s.rows == "behind":
        s = _with(s, weight_on="output")
    if s.find != "top1_mask" and s.combine == "assign":
        s = _with(s, combine="iadd")
    return s


def _fit_spelling(s: Any, r: Routing, k: int) -> tuple[Any, Routing]:
    """Bring a spelling and a routing into agreement instead of throwing the draw away."""
    s = _fit_selected(s) if isinstance(s, Selected) else s
    if isinstance(s, Masked):
        chained = s.hit in ("chain", "replace") and s.accumulate not in ("add", "iadd", "add_")
        s = _with(s, hit="all") if s.weight == "given" or chained or (s.hit == "replace" and k != 1) else s
    flat = (isinstance(s, Selected) and s.find == "top1_mask") or (isinstance(s, Masked) and s.weight == "top1")
    if flat and (k != 1 or r.recipe not in ("argmax", "max")):
        s = _with(s, find="where", combine="index_add_") if isinstance(s, Selected) else _with(s, weight="sum_mask")
        flat = False
    if isinstance(s, Filled) and s.find == "flat_mask" and r.recipe == "sort_slice":
        s = _with(s, find="flat_where")
    if isinstance(s, Masked) and s.weight == "slot_loop" and s.accumulate in ("stack_einsum", "cat_dense"):
        s = _with(s, accumulate="stack_sum")
    r = _with(r, flat=flat)
    given = getattr(s, "weights", getattr(s, "weight", "")) == "given"
    if given and not r.recipe.startswith("neg_inf"):
        r = _with(r, recipe="neg_inf_softmax")
    elif not given and r.recipe.startswith("neg_inf"):
        r = _with(r, recipe="topk_softmax")
    if r.recipe.startswith(("topk", "neg_inf")):
        r = _with(r, renorm="none")
    return s, r


def _fit_rest(s: Any, body: Body, store: Store, dtype: str) -> tuple[Any, Body, Store, str]:
    if isinstance(s, Slots | Sorted | Dense) and store.kind not in ("stacked", "flat"):
        store = _with(store, kind="stacked")
    if store.kind != "stacked" or isinstance(s, Slots | Sorted | Dense):
        store = _with(store, access="index")
    if store.kind == "sequential":
        body = _with(body, gating="plain", extra="none", split="chunk", up_first=False)
        body = _with(body, activation="gelu" if body.activation in NEEDS_GATE else body.activation)
    if store.kind in ("module_list", "module_dict", "sequential"):
        store = _with(store, layout=("out-in", "out-in"))
    if store.kind == "flat":
        store = _with(store, layout=(store.layout[0], store.layout[0]))
    if isinstance(s, Sorted):
        dtype = "float32" if s.gemm == "fallback" else "bfloat16"
        if s.unsort == "index_add_":
            s = _with(s, weigh="before")
    if isinstance(s, Slots) and s.weight_on == "input":
        s = _with(s, ids="flat", combine="mul_view_sum" if s.combine != "index_add" else "index_add")
    if isinstance(s, Slots) and s.ids == "grid" and s.combine == "index_add":
        s = _with(s, combine="einsum")
    if isinstance(s, Dense) and s.weight_on == "input":
        s = _with(s, product="bmm")
        body = _with(body, bias=False, extra="none" if body.extra == "layernorm_each" else body.extra)
        body = _with(body, activation="silu" if body.activation in NONZERO_AT_ZERO else body.activation)
    if dtype == "bfloat16" and body.activation not in SMOOTH:
        body = _with(body, activation="silu")
    return s, body, store, dtype


@st.composite
def programs(draw: st.DrawFn, spellings: tuple[type[Any], ...] = SPELLINGS, dtypes: tuple[str, ...] = DTYPES) -> Program:
    """A valid program; shrinks towards a small loop over stacked experts with `where` and `index_add_`."""
    cls = draw(st.sampled_from(spellings))
    s, r, body, store = draw(choices(cls)), draw(routings()), draw(bodies()), draw(stores())
    top_k = draw(st.integers(1, 3))
    if r.recipe in ("argmax", "max"):
        top_k = 1
    experts = draw(st.integers(max(2, top_k), 6))
    s, r = _fit_spelling(s, r, top_k)
    s, body, store, dtype = _fit_rest(s, body, store, draw(st.sampled_from(dtypes)))
    tokens = draw(st.sampled_from(TOKENS))
    noise = draw(choices(Noise))
    program = Program(
        spelling=s,
        routing=r,
        body=body,
        store=store,
        noise=noise if len(tokens) > 1 else _with(noise, layout="features_last"),
        tokens=tokens,
        experts=experts,
        top_k=top_k,
        hidden=8 if isinstance(s, Sorted) and dtype == "bfloat16" else draw(st.sampled_from((8, 12))),
        inter=8 if isinstance(s, Sorted) and dtype == "bfloat16" else draw(st.sampled_from((4, 6, 10, 1))),
        dtype=dtype,
        seed=draw(st.integers(0, 3)),
    )
    reason = invalid(program)
    if reason is not None:
        # What is left over: repeated ids, dense input weights.  Rare, so drawing again is cheap.
        reject()
    return program


@st.composite
def odd_ids(draw: st.DrawFn, spellings: tuple[type[Any], ...]) -> Program:
    """A program whose router makes something else of the ids that it chose."""
    changed = st.sampled_from([how for how in get_args(get_type_hints(Routing)["ids"]) if how != "chosen"])
    exact = programs(spellings, ("float32",)).filter(lambda p: p.dtype == "float32")  # it is run in double, too
    p = draw(exact.filter(lambda p: p.routing.recipe != "inputs" and not p.routing.recipe.startswith("neg_inf")))
    return _with(p, routing=_with(p.routing, ids=draw(changed)))


@st.composite
def near_misses(draw: st.DrawFn, mutation: Mutation) -> Program:
    """float32 programs that a mutation applies to."""
    # Hypothesis tries the smallest program first, the same for every mutation; where only few examples are run that is a waste.
    if draw(st.integers(0, 9)) == 0:
        reject()
    fitting = tuple(cls for cls in SPELLINGS if any(mutation.applies(p) for p in _examples(cls)))
    return draw(programs(fitting, ("float32",)).filter(lambda p: p.dtype == "float32" and mutation.applies(p)))


def _examples(cls: type[Any]) -> tuple[Program, ...]:
    if cls is Dense:
        return Program(spelling=Dense()), Program(spelling=Dense(weights="gather"))
    if cls is Sorted:
        return Program(spelling=Sorted()), Program(spelling=Sorted(weigh="after"))
    return (Program(spelling=cls()),)
