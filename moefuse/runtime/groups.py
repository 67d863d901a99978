"""The process groups that expert-parallel ops run on, by name, and the terms of a call.

A graph names its mesh and its terms and holds no rank, no process group and no number of ranks, so that all ranks compile equal graphs and
a cached one is good for every run.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from moefuse.errors import ParallelError
from moefuse.runtime import providers

Tokens = Literal["distinct", "replicated", "sequence"]
Transport = Literal["allgather", "all_reduce", "all_to_all", "gather", "rails", "symm"]
Grads = Literal["mean", "sum"]
Most = Literal["any", "equal"]
Split = Literal["experts", "slices"]
_DEBUG, _COPIED = "/debug", "/copied"


@dataclass(frozen=True)
class Terms:
    """How the tokens of one plan travel; in a graph one short text, :attr:`text`.

    Attributes:
        mesh: name of the :class:`Group`.
        transport: ``"allgather"`` of distinct tokens, ``"all_to_all"`` of those that a rank needs, ``"all_reduce"`` of results where
            every rank has the same tokens, ``"gather"`` of weights, ``"rails"`` of those that a host needs, which are forwarded there,
            ``"symm"`` through memory that ranks of a host share.
        tokens: whose tokens a rank has: its own of a batch, the same as all others, or a part of a sequence.
        most: ``"any"`` number of tokens (exchanged in each call), an ``"equal"`` one on all ranks, or the largest on any rank.
        grads: whether gradients of experts are the mean over ranks with distinct tokens, as data parallelism takes it, or the sum.
        placement: what a report calls the table of experts.
        split: whether a rank has some of the experts, or a slice of each.
        copies: how many groups of ranks have all experts, because there are fewer experts than ranks.
        replicas: how many ranks of another dimension of the mesh have the same experts, and other tokens.
        bound: of rows that training keeps for backward: so many times an even share, ``"exact"``, or ``"most"``, as many as may come.
        debug: whether ranks compare what they do before each op (``runtime/debug.py``).
        copied: whether a rank has copies of some experts, and a table of its own, by which it keeps their tokens.
    """

    mesh: str
    transport: Transport = "allgather"
    tokens: Tokens = "distinct"
    most: int | Most = "any"
    grads: Grads = "mean"
    placement: str = "linear"
    split: Split = "experts"
    copies: int = 1
    replicas: int = 1
    bound: float | Literal["most", "exact"] = "most"
    debug: bool = False
    copied: bool = False

    @functools.cached_property
    def text(self) -> str:
        """What :meth:`parse` reads."""
        said = (self.mesh, self.transport, self.tokens, self.most, self.grads, self.placement, self.split)
        return "/".join(map(str, (*said, self.copies, self.replicas, self.bound))) + _COPIED * self.copied + _DEBUG * self.debug

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def parse(text: str) -> Terms:
        """The terms in a graph."""
        text, _, _ = text.partition(_WEIGHT)
        known = text.removesuffix(_DEBUG)
        mesh, transport, tokens, number, grads, placement, split, *counts, bound = known.removesuffix(_COPIED).rsplit("/", 9)
        debug, copied = text != known, known.endswith(_COPIED)
        most = int(number) if number.isdigit() else number
        copies, replicas = map(int, counts)
        kept: Any = bound if bound in ("most", "exact") else float(bound)
        return Terms(mesh, transport, tokens, most, grads, placement, split, copies, replicas, kept, debug, copied)  # type: ignore[arg-type]

    @property
    def tells(self) -> bool:
        """Whether ranks tell each other how many tokens they have before these travel, and so that one of them has raised."""
        return self.most == "any" and self.transport == "allgather"

    @property
    def group(self) -> Group:
        """The group of that name in this process."""
        return group(self.mesh)

    def describe(self, held: int, experts: int) -> str:
        """``ep=4 linear, 32 of 128 experts here, allgather, tokens <= 512``, or ``tp=2, a slice of 32 experts here, all_reduce``."""
        kept = "" if self.bound == "most" else f", rows kept: {self.bound}"
        most = kept + {"any": "", "equal": ", equal numbers of tokens"}.get(str(self.most), f", tokens <= {self.most}")
        way = f"all_to_all over {self.group.spans} hosts" if self.transport == "rails" else self.transport
        dp = f"dp={self.replicas} x " if self.replicas > 1 else ""
        if self.split == "slices":
            return f"{dp}tp={self.group.size}, a slice of {held} experts here, {way}{most}"
        copies = f" x {self.copies} copies" if self.copies > 1 else ""
        return f"{dp}ep={self.group.size}{copies} {self.placement}, {held} of {experts} experts here, {way}{most}"

    def scale(self) -> float:
        """What the gradient of a result is multiplied by on its way to the experts, which see the tokens of all ranks of the group.

        What copies and replicas find is averaged, so sums over them are that much larger before.
        """
        averaged = self.replicas if self.grads == "sum" else 1
        if self.tokens == "distinct" and self.grads == "mean":
            return 1 / self.group.size
        return float(averaged * (self.copies if self.tokens != "replicated" else 1))

    def scale_gathered(self) -> float:
        """What the sum of all ranks' gradients of gathered weights is multiplied by: equal tokens give equal gradients on each."""
        return self.scale() / self.group.size if self.tokens == "replicated" else self.scale()

    @property
    def averages(self) -> bool:
        """Whether there are copies of experts that have gradients of other tokens."""
        return self.replicas > 1 or (self.copies > 1 and self.tokens != "replicated")


def of_weight(terms: str, name: str) -> str:
    """The terms of a gather, which say of what: weights of one layer and shape are told apart by nothing else. Those of experts say what
    these compute, on the tokens of all ranks."""
    return f"{terms}{', ' if _WEIGHT in terms else _WEIGHT}{name}"


def weight_of(terms: str) -> tuple[str, str]:
    """(terms, name of a weight), as :func:`of_weight` was given them."""
    known, _, name = terms.partition(_WEIGHT)
    return known, name


def said_of(op: str, terms: str) -> str:
    """What ranks tell each other that they run: an op, and what its terms are of."""
    return f"{op} {weight_of(terms)[1]}".rstrip()


_WEIGHT = "#"


FAILED = -1
"""``FAILED`` in player.cpp."""


@dataclass
class Standing:
    """Whether this process is in step with the others of a group.

    Attributes:
        left: the error after which it is not; empty if it is.
        told: whether the others know.
        first: what is to be checked before the first op, on all ranks alike.
        plans: how often :func:`moefuse.parallelize` was called.
        pending: rows of earlier calls that may turn out to be too few (``runtime/overflow.py``).
        guard: zero as long as C++ may play calls from their records; :data:`FAILED` after it has failed in the middle of one.
    """

    left: str = ""
    told: bool = False
    first: list[Callable[[], None]] = field(default_factory=list)
    plans: int = 0
    pending: list[Any] = field(default_factory=list)
    guard: ctypes.c_int64 = field(default_factory=ctypes.c_int64)

    def leave(self, error: str) -> None:
        """After this error the process is not in step any more."""
        self.left, self.guard.value = error, 1


@dataclass(frozen=True)
class Group:
    """P processes that share experts.

    Attributes:
        ranks: their global ranks, in the order of the mesh.
        rank: this process's place among them.
        process_group: for tensors on the device.
        host: for numbers on the host: a group of its own, so that these are never taken for anything else.
        hosts: [P], the number of the host of each.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    process_group: Any
    host: Any
    hosts: tuple[int, ...] = ()
    standing: Standing = field(default_factory=Standing, compare=False)

    @property
    def size(self) -> int:
        """P."""
        return len(self.ranks)

    @property
    def spans(self) -> int:
        """Number of hosts."""
        return len(set(self.hosts)) or 1


_groups: dict[str, Group] = {}


def register(name: str, ranks: tuple[int, ...], rank: int, process_group: Any, host: Any, hosts: tuple[int, ...] = ()) -> Group:
    """Remember a group under ``name``, or under ``name-2`` and so on, if other ranks have that.

    All ranks of a job register their meshes in the same order, as they make them, so that a name means the same mesh on each.
    """
    number = 1
    while True:
        known = f"{name}-{number}" if number > 1 else name
        found = _groups.get(known)
        if found is None or (found.ranks, found.rank) == (ranks, rank):
            before = earlier(process_group)
            standing = Standing() if before is None else before.standing
            providers.forget_records()  # of a mesh that had this name before
            _groups[known] = Group(known, ranks, rank, process_group, host, hosts, standing)
            return _groups[known]
        number += 1


_held: dict[tuple[int, int], None] = {}


def hold(here: int, slots: int) -> None:
    """Remember that this rank has ``here`` experts of a layer, where the ranks with the most have ``slots``."""
    if here != slots:
        _held[here, slots] = None


def held() -> str:
    """What this rank has that others may have in other numbers; empty where all have as many, so that they share what is compiled."""
    return f" held {sorted(_held)}" if _held else ""


def group(name: str) -> Group:
    """The group of a mesh.

    Raises:
        ParallelError: nobody has registered one in this process.
    """
    if name not in _groups:
        raise ParallelError(f"this graph runs on the mesh {name!r}, which this process does not have: call moefuse.parallelize first")
    return _groups[name]


def earlier(process_group: Any) -> Group | None:
    """A group with the same process group; None if there is none."""
    return next((known for known in _groups.values() if process_group is not None and known.process_group is process_group), None)


TOKENS, GRADS = get_args(Tokens), get_args(Grads)
