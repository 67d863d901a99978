"""Refusal codes and error classes. A code is stable; its line here is what the user reads, `{…}` filled by the rule that refused.

Every code has one line in docs/refusals.md and one negative test; tests/null/test_refusal_codes.py holds the three sets equal.
"""

from __future__ import annotations

from collections.abc import Mapping

CODES: dict[str, str] = {
    "no-rule": "expert rows go through `{op}`, which has no rule: what it computes per row is unknown",
    "not-row-local": "`{op}` takes the rows of an expert together, so what it gives depends on which other tokens were routed there",
    "random": "`{op}` draws random numbers inside the expert",
    "hook": "a hook observes a value inside the experts",
    "value-escapes": "{name}, a value inside the experts, is also used outside them",
    "mutation": "{name} is changed in place while the experts use it",
    "alias": "{name} is changed in place through a view that is read again",
    "overlap": "{name} is written to here, and may be memory of what the experts read: {detail}",
    "experts-differ": "expert {expert} differs from expert 0: {detail}",
    "missing-experts": "only experts {present} are computed, of {count}",
    "ids-not-distinct": "a repeated expert id of a token would count once here: {ids}",
    "ids-out-of-range": "expert ids may belong to no expert, and mean something else here than no contribution: {detail}",
    "not-weighted": "expert outputs reach the sum without the mask or routing weight that selects them",
    "sum-changed": "the sum goes through `{op}` before all experts are added to it",
    "not-combined": "expert rows never reach a sum over the chosen experts of a token",
    "capacity": "experts take a limited number of tokens here: {detail}",
    "expert-choice": "experts choose their tokens here, not tokens their experts: every expert has the same number of rows",
    "threshold": "{name} is of tokens whose score is above a number: each may have any number of experts, and an op has K for each token",
    "tokens-differ": "the experts' input rows do not line up with the expert ids: {detail}",
    "encoding-unknown": "expert weights are held as {dtype}: {detail}",
    "encoding-unsupported": "expert weights are held as {dtype}, and no op multiplies them as they are: {detail}",
    "quantised": "expert weights are packed in a way that moefuse does not read: {detail}",
    "sharded": "the experts are spread over processes: {detail}",
    "experts-gathered": "the weights of these sharded experts are gathered from all ranks in every call: {detail}",
    "dtype-unsupported": "dtype {dtype} is not supported by the fused op ({detail})",
    "device-unsupported": "the fused op does not run on {device}: {detail}",
    "not-captured": "{what} depends on data, and {detail}; the graph breaks here as it would without moefuse",
    "not-recognised": "the best of {count} scores are chosen, as experts are, and what follows is none of the ways to run experts that "
    "moefuse reads: it cannot follow `{op}`",
    "nothing-found": "the model has {what}, and moefuse has fused nothing: {cause}",
    "excluded": "the module path matches options['exclude']",
    "limit": "options['max_rewrites'] regions were fused already",
    "context-differs": "the experts run under another grad mode than their sum: {detail}",
    "transformed": "torch.func transforms the experts here ({name}), and their fused op has no rules for that",
    "not-lowered": "the region is understood, but its replacement does not type-check: {detail}",
    "verification-failed": "the fused op and the original disagree on this model's weights: {detail}",
    "verification-error": "the check against the original could not run: {detail}",
    "effects-differ": "the rewritten graph would do something else than the program: {name} {detail} (please report it)",
    "graph-differs": "run as a whole before and after the rewrite, the graphs do not agree in {name}: {detail}",
    "not-faster": "{program} us as it is and {fused} us as the fused op for {tokens} tokens on {device} ({source})",
    "internal-error": "moefuse itself failed, so the whole graph stays as it was: {error} (please report it with the logged traceback)",
}


UNCOUNTED = "only the run knows how many tokens there are"
"""``verification-error`` where nobody can say how many tokens to draw."""

_ALL_DIFFER = "the experts do not all compute the same: {detail}"
"""``experts-differ`` where no expert but the first is to blame, or nobody knows which."""


_NOT_ALL = "not all experts are computed for all choices of a token: {detail}"
"""``missing-experts`` where what is missing has no numbers, or is no expert."""

_ONLY_ONE = "only expert {present} is computed, of {count}"
"""``missing-experts`` where there is one."""

_SEVERAL = "the experts are computed {times} times into one sum here, and a fused op computes each once"
"""``missing-experts`` where there are all, and more."""

_OVERWRITTEN = "expert rows are assigned here, not added: of a token's {choices} experts, only the one that is written last stays"
"""``not-combined`` where there is an accumulator, and nothing adds to it."""

_MADE_IN = "the sum is made in {name}, {where}, and a fused op writes to no memory that others may hold"
"""``mutation`` where a sum is made in a tensor that the graph has not made."""

_HELD_BEFORE = (
    "{name} is written to here, and gradients are computed of what it held before; {before} keeps the graph from working on a copy of it"
)
"""``mutation`` where one graph would compute gradients of other values than the program."""

_GAINS = "gradients of what is written to {name} would reach from {into} into this one, and it outlives the call: detach what is added"
"""``mutation`` where a statistic that nobody has detached is written to a buffer."""

_INTO = "expert rows are put together with {into} here; what moefuse reads is a sum: what stood at the tokens of these rows, and the rows"
"""``not-combined`` where rows are computed from what stands where they are put."""

_BOTH_WAYS = "some experts' rows replace what stood at their tokens here, and others' are added to it: an op does one of the two for all"
"""``not-combined`` where there is an accumulator, and rows are put into it by turns."""

_BY = "expert rows reach what the other experts computed by `{by}`, and only sums are fused"
"""``not-combined`` where there is an accumulator that something else than a sum is made in."""

_OTHERWISE = "expert rows go through `{op}` in a way that its rule does not read: what it computes per row is unknown"
"""``no-rule`` where the operation has a rule for other arguments."""

_BEHIND = (
    "an expert runs on all tokens, and its rows are taken from the result (`{op}`): what moefuse reads takes them before the expert runs"
)
"""``no-rule`` where rows are selected behind what an expert computes."""

_HOW = "expert rows go through {how}: what it computes per row is unknown"
"""``no-rule`` where the name of an operation does not say what is in the way."""

_CUT_OFF = "expert rows go through `{op}`: gradients end there, which no fused op does"
"""``no-rule`` where the values are known, and not the gradients."""

_UNREAD = "expert rows go through `{op}` with `{argument}`, which no rule reads: what it computes per row, or its gradient, is unknown"
"""``no-rule`` for an operation that has one, with an option that it has not."""


_LOOPED = "with {count} experts of one projection each, the loop over them is trained as fast on a CPU as the ops that would replace it"
"""``not-faster`` where sizes say so."""


def message(code: str, details: Mapping[str, object]) -> str:
    """The text of a refusal, with what the rule found in it."""
    return _text(code, details).format(**details)


def _text(code: str, details: Mapping[str, object]) -> str:
    if code == "experts-differ" and details.get("expert") in ("?", "0"):
        return _ALL_DIFFER
    if code == "missing-experts" and str(details.get("present", "")).isdigit():
        return _ONLY_ONE
    if code == "no-rule" and details.get("op") == "detach":
        return _CUT_OFF
    return next((text for key, text in _BY_DETAIL.get(code, {}).items() if key in details), CODES[code])


_BY_DETAIL: dict[str, dict[str, str]] = {
    "not-faster": {"count": _LOOPED},
    "missing-experts": {"detail": _NOT_ALL, "times": _SEVERAL},
    "mutation": {"into": _GAINS, "before": _HELD_BEFORE, "where": _MADE_IN},
    "not-combined": {"into": _INTO, "by": _BY, "choices": _OVERWRITTEN, "ways": _BOTH_WAYS},
    "no-rule": {"argument": _UNREAD, "how": _HOW, "behind": _BEHIND, "known": _OTHERWISE},
}
"""Texts of refusals by what is known of them: the first that has its detail, else the one in ``CODES``."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for a message; the name of its class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class FusionError(RuntimeError):
    """Raised under ``options={"strict": True}`` when a mixture-of-experts-looking region is not fused. The text is the report's."""


class CompilerError(RuntimeError):
    """Inductor has C++ to compile for this graph, and finds no compiler. The text says what to install."""


class OptionError(ValueError):
    """A wrong option name or value; the text lists the legal ones."""


class ParallelError(ValueError):
    """``moefuse.parallelize`` cannot do what it was asked for; nothing has been changed. The text names the module and the remedy."""


class RoutingError(RuntimeError):
    """Routing cannot be captured or replayed as it was asked for. The text names the layer, and says why or what to do."""


class PeerError(RuntimeError):
    """Another rank has failed, has left, or does something else. The text names the layer."""


class TooManyTokens(PeerError):  # noqa: N818  (what happened, as in the documentation)
    """A rank has more tokens than ``max_tokens`` promised."""
