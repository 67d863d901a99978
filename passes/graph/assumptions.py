"""What capture assumed, as values: where, what about, and everything that happened under it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch.fx import Graph, GraphModule, Node

Kind = Literal["row", "end", "size", "value", "list", "length", "element"]

TAG = "moefuse_assumptions"
"""Key of a node's meta: how many assumptions it was made under. A copy of such a node carries it too, and is then noticed."""
DUMMY = "moefuse_dummy"
"""Key of the meta of nodes of a pass of an expert without tokens (``capture/dummies.py``)."""


@dataclass(frozen=True)
class Place:
    """An instruction of the user's program."""

    code: Any
    offset: int | None


@dataclass(eq=False)
class Assumption:
    """One way taken on an assumption.

    Attributes:
        kind: ``"row"``: this iteration runs, for row ``row`` of the mask ``subject``. ``"end"``: from row ``row`` on the mask ``subject``
            is false; no iteration was traced for these rows. ``"size"``: the unbacked size ``subject`` is at least one. ``"value"``: the
            tensor ``subject`` is true (``outcome``) or false. ``"list"``: the program has appended one of ``items`` to a list.
            ``"length"``: the tensor ``subject`` has ``row`` elements; or no more than that, and each of ``items`` is read in an
            iteration of its own. ``"element"``: this iteration runs: the tensor ``subject`` has an element ``row``.
        row_node, members: where this iteration was traced as the representative of several rows: the row in the graph, and all of them.
        witness, witness_node: where the body runs a module of a list, the second row that was traced: it shows what differs between rows.
        siblings: then, for each weight of the representative in the graph: the same weight of each of ``members`` and the witness.
        numbers: rows that Python has as numbers, and uses as an index of tensors only.
        place: the statement.
        location: the user's ``file:line``.
        graph, whole: the graph that was being written, and the one that it is the body of an operation in, or itself.
        concerns_experts: whether what it is about is computed from expert ids; None if nobody has looked.
        nodes: every operation recorded in the scope.
        first: what was computed in the scope because it is kept and was first asked for here; else it is computed later, and is no node.
        carried: locals that are live behind the scope and hold another tensor or number than before: (name, before, now), each a
            node or a constant.
        appended: what the scope appended to lists that are older.
        returned: what the function returns in the scope, where the other way returns a tensor that is the same without elements.
        dummy: whether the other way adds zero times something, so that all it leaves are gradients of zeros.
    """

    kind: Kind
    place: Place
    location: str
    subject: Any
    row: int = 0
    row_node: Node | None = None
    members: tuple[int, ...] = ()
    witness: int | None = None
    witness_node: Node | None = None
    siblings: dict[Node, dict[int, Node]] = field(default_factory=dict)
    numbers: set[Node] = field(default_factory=set)
    outcome: bool = True
    graph: Graph | None = None
    whole: Graph | None = None
    concerns_experts: bool | None = None
    nodes: set[Node] = field(default_factory=set)
    first: set[Node] = field(default_factory=set)
    carried: list[tuple[str, Any, Any]] = field(default_factory=list)
    appended: list[Node] = field(default_factory=list)
    items: tuple[Node, ...] = ()
    returned: Node | None = None
    dummy: bool = False

    @property
    def what(self) -> str:
        """How the refusal calls it."""
        return "this loop" if self.kind in ("row", "end", "element") or (self.kind == "length" and self.items) else "this branch"


@dataclass(frozen=True, eq=False)
class Undischarged:
    """An assumption that does not hold for every input, and why."""

    assumption: Assumption
    detail: str


def erase_dummies(gm: GraphModule) -> bool:
    """Take what passes of experts without tokens recorded out of a graph, where nothing of it is read; whether there was any."""
    nodes = [n for n in gm.graph.nodes if n.meta.get(DUMMY)]
    for node in reversed(nodes):
        gm.graph.erase_node(node)
    return bool(nodes)
