"""What all attempts of Dynamo at one frame have in common, and what the user reads of assumptions that do not hold."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from moefuse.capture.dynamo import relations
from moefuse.errors import CODES
from moefuse.passes.graph.assumptions import Assumption, Undischarged
from moefuse.program.breaks import Stop
from moefuse.report.doors import module_names
from moefuse.report.entries import Skipped


@dataclass
class Ledger:
    """What all attempts at one frame have in common.

    Attributes:
        off: trace this frame as if moefuse had no capture. One assumption that does not hold is enough: where Dynamo has to break the graph
            anyway, it shall break it as it always does, and the frames behind the break are captured by themselves.
        unroll: trace every row of a loop; representatives were tried and did not do.
        numbers: read numbers out of tensors, where moefuse made that traceable; not once a compiler could not take such a graph.
        collects: trace bodies of checkpoints that write to what the call has made; not once that was there when a graph ended.
        makes_leaves: trace tensors that the call makes with ``requires_grad=True``; not once what left a graph had gradients only by one.
        counts: trace ``bincount`` as a sum where its length is known.
        parametrizes: trace parametrisations that the call registers and removes; not once one of them was more than that.
        cut: where the graph ends in front of a loop that Dynamo cannot break, and why; nothing was tried yet while it is None.
        broken: the graph breaks somewhere, in an attempt that traced sizes that depend on data.
        met: what a graph that was given up is given, because it writes to what its experts read: calls whose inputs are apart have another.
        unrelated: why no guard can tell which inputs of the graph lie in one memory; empty while nothing speaks against it.
        erred: the program raises in this call, or would if it came that far.
        seen: names of what the graphs of attempts that were given up have read.
        refusals: why, for the report of the next attempt.
        stops: the breaks of the graph in attempts that were given up.
        notes: what else the report has to say.
    """

    off: bool = False
    unroll: bool = False
    numbers: bool = True
    collects: bool = True
    makes_leaves: bool = True
    counts: bool = True
    parametrizes: bool = True
    cut: tuple[int, Stop] | None = None
    broken: bool = False
    met: Sequence[relations.Input] = ()
    unrelated: str = ""
    erred: bool = False
    seen: set[str] = field(default_factory=set)
    refusals: list[Skipped] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def concerns_experts(assumption: Assumption) -> bool:
    """Whether what was assumed about has to do with expert ids at all; other code that depends on data is nothing to report."""
    from moefuse.passes.prove.concerns import concerns_routing

    try:
        return concerns_routing(assumption)
    except Exception:  # a question about a graph that is half written; nothing but a line of the report hangs on it
        return True


def refusals(problems: list[Undischarged], *, of_any: bool = False) -> list[Skipped]:
    """What the user reads about assumptions that do not hold, one line for each statement.

    Those that are about experts; or ``of_any``, where they are in the way of some.
    """
    out: dict[str, Skipped] = {}
    for problem in problems:
        assumption = problem.assumption
        if assumption.location not in out and (of_any or concerns_experts(assumption)):
            text = CODES["not-captured"].format(what=assumption.what, detail=problem.detail)
            out[assumption.location] = Skipped("not-captured", text, _module(assumption), assumption.location)
    return list(out.values())


def _module(assumption: Assumption) -> str:
    """The module that computes what was assumed about, or the innermost one around everything that was traced under it."""
    subject = assumption.subject
    nodes = [subject] if isinstance(subject, torch.fx.Node) else assumption.nodes
    stacks = [list(node.meta.get("nn_module_stack", {}).items()) for node in nodes]
    around = itertools.takewhile(lambda entries: all(entry == entries[0] for entry in entries), zip(*stacks, strict=False))
    return module_names.of_traced(dict(entries[0] for entries in around)) if stacks else ""
