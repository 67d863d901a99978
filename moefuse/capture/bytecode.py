"""Questions about a function's bytecode: where two ways of a branch meet, which locals are live, whether a loop is a plain ``for``.

Instructions are Dynamo's: ``opname``, ``argval``, ``target`` (an instruction), ``exn_tab_entry``. Nothing here knows torch.
"""

from __future__ import annotations

import dis
import opcode
from collections.abc import Collection, Sequence
from typing import Any

Instruction = Any

GENERATOR = 0x20 | 0x80 | 0x200
"""Flags of code whose frame stops and goes on."""

_SUBSCRIPT = next((i for i, (name, _) in enumerate(getattr(opcode, "_nb_ops", ())) if name == "NB_SUBSCR"), None)
_NOTHING = frozenset(("NOP", "EXTENDED_ARG", "CACHE", "NOT_TAKEN", "RESUME"))
_ALWAYS_JUMPS = frozenset(("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_NO_INTERRUPT", "JUMP"))
RETURNS = frozenset(("RETURN_VALUE", "RETURN_CONST"))
_ENDS = frozenset(("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"))

_MAKES_ONE = frozenset(("BUILD_TUPLE", "CALL", "CALL_KW", "BINARY_SUBSCR", "BINARY_OP", "GET_ITER"))
_BESIDE = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_DEREF", "PUSH_NULL", "KW_NAMES", "PRECALL", *_MAKES_ONE))
"""What the other parts of an index may be computed by: ``w[rows.tolist(), slots.tolist(), None]``."""

_OPENS_LIST = _NOTHING | {"LOAD_FAST_AND_CLEAR", "SWAP", "BUILD_LIST"}
"""What stands between the iterator and the loop of a list comprehension from Python 3.12 on."""

_KINDS = {
    "IS_OP": "identity", "CONTAINS_OP": "contains", "BINARY_SUBSCR": "subscript", "CALL": "call", "CALL_KW": "call",
    "CALL_FUNCTION_EX": "spread", "GET_ITER": "get_iter", "FOR_ITER": "for_iter", "PUSH_EXC_INFO": "handler",
}  # fmt: skip
CONSUMED = {
    "FOR_ITER": 1, "UNPACK_SEQUENCE": 1, "UNPACK_EX": 1, "CONTAINS_OP": 1, "BINARY_OP": 1, "LIST_EXTEND": 1, "SET_UPDATE": 1,
    "DICT_UPDATE": 1, "DICT_MERGE": 1, "SEND": 2, "STORE_SUBSCR": 3, "STORE_SLICE": 4,
}  # fmt: skip
"""Instructions that may take items from an iterator: at which place of the stack it lies, counted from the top. Calls are beside them."""

_CONSTANT_MESSAGE = frozenset(("LOAD_CONST", "PRECALL", "CALL", "CALL_FUNCTION", "CACHE"))


def _kind(name: str, arg: int | None = None) -> str:
    if name == "BINARY_OP":
        return "subscript" if arg is not None and arg == _SUBSCRIPT else ""
    if "JUMP" in name and "_IF_" in name:
        return "jump"
    return "format" if name.startswith("FORMAT_") else _KINDS.get(name, "")


KINDS: dict[str, str] = {name: _kind(name) for name in dis.opmap if _kind(name) or name == "BINARY_OP"}
"""Names of the instructions that capture looks at, and what they are to it; a look-up says of all others that nothing is to be done."""


def kind(inst: Instruction) -> str:
    """What an instruction is to capture, in this release of Python; empty for what it does not look at."""
    found = KINDS.get(inst.opname)
    return _kind(inst.opname, inst.arg) if found == "" else found or ""


def _is_assertion(inst: Instruction) -> bool:
    return inst.opname == "LOAD_ASSERTION_ERROR" or (inst.opname == "LOAD_COMMON_CONSTANT" and "AssertionError" in str(inst.argval))


class Code:
    """One function's instructions, with the answers that need the whole of it."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.instructions = list(instructions)
        self.index = {id(inst): i for i, inst in enumerate(self.instructions)}
        self._live: dict[bool, list[frozenset[str]]] = {}
        self._always: list[frozenset[int]] | None = None

    def landing(self, start: int) -> int | None:
        """The first instruction from ``start`` on that does something; None if the way there is a circle."""
        seen: set[int] = set()
        at = start
        while at < len(self.instructions) and at not in seen:
            seen.add(at)
            inst = self.instructions[at]
            if inst.opname in _ALWAYS_JUMPS:
                at = self.index[id(inst.target)]
            elif inst.opname in _NOTHING:
                at += 1
            else:
                return at
        return None

    def meeting(self, at: int) -> int | None:
        """The first instruction that does something and that every way from ``at`` comes to; None if there is none."""
        if self._always is None:
            self._always = self._postdominators()
        behind = self._always[at] - {at}
        first = next((i for i in behind if behind == self._always[i]), None)
        return None if first is None else self.landing(first)

    def leaves(self, start: int, other: int) -> bool:
        """Whether every way from ``start`` returns from the function, or raises, and comes to nothing that a way from ``other`` does."""
        mine, theirs = self._reach(start), self._reach(other)
        return not mine & theirs and any(self.instructions[i].opname in RETURNS for i in mine)

    def _reach(self, start: int) -> set[int]:
        found, todo = set(), [start]
        while todo:
            at = todo.pop()
            if at not in found:
                found.add(at)
                todo += self._successors(at, handlers=False)
        return found

    def _postdominators(self) -> list[frozenset[int]]:
        """For each instruction those that every way from it to the end of the function goes through, itself included."""
        count = len(self.instructions)
        every = frozenset(range(count))
        found = [every] * count
        changed = True
        while changed:
            changed = False
            for i in range(count - 1, -1, -1):
                following = self._successors(i, handlers=False)
                new = frozenset((i,)) | (frozenset.intersection(*(found[j] for j in following)) if following else frozenset())
                changed = changed or new != found[i]
                found[i] = new
        return found

    def ways(self, at: int) -> tuple[int, int] | None:
        """(where the conditional jump at ``at`` goes when its value is true, when it is false); None for any other instruction.

        Jumps that leave the tested value on the stack (``a or b`` as a value) and jumps on None are not among them.
        """
        inst = self.instructions[at]
        if "JUMP" not in inst.opname or "OR_POP" in inst.opname or not inst.opname.endswith(("IF_TRUE", "IF_FALSE")):
            return None
        jump, following = self.index[id(inst.target)], at + 1
        return (jump, following) if inst.opname.endswith("IF_TRUE") else (following, jump)

    def asserts(self, at: int) -> bool | None:
        """What a value must be for the ``assert`` that jumps by it to hold; None of other jumps, and where Dynamo reads it itself."""
        ways = self.ways(at)
        if ways is None:
            return None
        raising = [self._asserting(way) for way in ways]
        if raising[0] is raising[1] is None or None not in raising:
            return None
        holds, message = raising[0] is None, raising[1] if raising[0] is None else raising[0]
        return None if holds and message else holds

    def _asserting(self, start: int) -> bool | None:
        """Whether the message of the assertion that fails at ``start`` is a constant; None where none fails."""
        at = self.landing(start)
        if at is None or not _is_assertion(self.instructions[at]):
            return None
        end = next((i for i in range(at, len(self.instructions)) if self.instructions[i].opname in _ENDS), len(self.instructions))
        return {inst.opname for inst in self.instructions[at + 1 : end]} <= _CONSTANT_MESSAGE

    def outermost_loop(self, at: int) -> int | None:
        """Where the outermost loop around an instruction begins; None if it is in no loop."""
        jumps = ((i, self.index[id(inst.target)]) for i, inst in enumerate(self.instructions) if inst.target is not None)
        return min((target for i, target in jumps if target <= at <= i), default=None)

    def plain_for(self, at: int) -> bool:
        """Whether ``GET_ITER`` at ``at`` feeds the ``for`` that follows and nothing else (no comprehension, no enumerate)."""
        following = at + 1
        while self.instructions[following].opname in ("EXTENDED_ARG", "CACHE"):
            following += 1
        return bool(self.instructions[following].opname == "FOR_ITER")

    def only_looped_over(self, name: str, before: int) -> bool:
        """Whether a local that is stored at ``before`` is read once from there on, as ``for ... in name``.

        The name may have held something else before, unless the program may come back to where that was read.
        """
        uses = [i for i, inst in enumerate(self.instructions) if name in _names(inst)]
        back = any(inst.target is not None and self.index[id(inst.target)] <= before for inst in self.instructions[before:])
        loads = [i for i in uses if i > before]
        if before not in uses or (uses[0] < before and back):
            return False
        if len(loads) != 1 or not self.instructions[loads[0]].opname.startswith("LOAD_FAST"):
            return False
        return self.instructions[loads[0] + 1].opname == "GET_ITER" and self.plain_for(loads[0] + 1)

    def only_indexes(self, name: str) -> bool:
        """Whether all that is done with a local is ``container[name]``, and ``name.item()``."""
        for i, inst in enumerate(self.instructions):
            names = _names(inst)
            if name not in names or inst.opname == "STORE_FAST":
                continue
            following = self.instructions[i + 1]
            reads = following.opname in ("LOAD_METHOD", "LOAD_ATTR") and following.argval == "item"
            last = inst.opname.startswith("LOAD_FAST") and names[-1] == name and names.count(name) == 1
            if not last or not (subscripts(following) or reads):
                return False
        return True

    def only_in_indices(self, name: str) -> bool:
        """Whether all that is done with a local is ``container[name]`` and ``container[..., name, ...]``, beside constants and locals."""
        for i, inst in enumerate(self.instructions):
            names = _names(inst)
            if name not in names or inst.opname == "STORE_FAST":
                continue
            if not _loads(inst) or names.count(name) != 1 or not self.becomes_an_index(i + 1, under=len(names) - 1 - names.index(name)):
                return False
        return True

    def becomes_an_index(self, at: int, *, under: int = 0) -> bool:
        """Whether the value that is ``under`` others on the stack in front of an instruction becomes an index, and nothing else.

        Alone or in a tuple of what is computed around it.
        """
        taken, behind = self._taken(at, under)
        if taken is None:
            return False
        inst = self.instructions[taken]
        return not behind if subscripts(inst) else inst.opname == "BUILD_TUPLE" and subscripts(self.instructions[taken + 1])

    def zipped(self, at: int) -> bool:
        """Whether the value on top of the stack in front of an instruction goes into ``zip(...)``, and a plain ``for`` through that.

        At once, or as a local that nothing else reads, or as what something is split by.
        """
        under, inst = 0, self.instructions[at]
        if inst.opname == "STORE_FAST":
            uses = [i for i, other in enumerate(self.instructions) if inst.argval in _names(other) and i != at]
            names = _names(self.instructions[uses[0]]) if uses else ()
            if len(uses) != 1 or uses[0] < at or not _loads(self.instructions[uses[0]]) or names.count(inst.argval) != 1:
                return False
            at, under = uses[0] + 1, len(names) - 1 - names.index(inst.argval)
        call, _ = self._taken(at, under)
        if call is None:
            return False
        if self._calls(call, "split", ("LOAD_METHOD", "LOAD_ATTR")):
            return self.zipped(call + 1)
        return self.goes_through(call) and self._calls(call, "zip", ("LOAD_GLOBAL",))

    def _calls(self, call: int, name: str, loads: Collection[str]) -> bool:
        """Whether an instruction calls what another has loaded by a name."""
        inst = self.instructions[call]
        given = inst.arg + (inst.opname == "CALL_KW")  # the names of keywords are a value, too
        found = [self._taken(i + 1, 0) for i, load in enumerate(self.instructions[:call]) if load.opname in loads and load.argval == name]
        return (call, given) in found or (call, given + 1) in found  # NULL is on it, or under it

    def goes_through(self, call: int) -> bool:
        """Whether a plain ``for`` goes through what an instruction calls for, and nothing else has it."""
        following = self.landing(call + 1)
        calls = self.instructions[call].opname in ("CALL", "CALL_KW")
        if not calls or following is None or self.instructions[following].opname != "GET_ITER":
            return False
        return self.plain_for(following) or self._in_comprehension(following)

    def _in_comprehension(self, at: int) -> bool:
        """Whether ``GET_ITER`` feeds a list comprehension, which up to Python 3.11 is a function of its own."""
        first = next((i for i in range(at + 1, len(self.instructions)) if self.instructions[i].opname not in _OPENS_LIST), at)
        if any(inst.opname == "BUILD_LIST" for inst in self.instructions[at:first]):
            return bool(self.instructions[first].opname == "FOR_ITER")
        call, _ = self._taken(at + 1, 0)
        made = [i for i, inst in enumerate(self.instructions[:at]) if inst.opname == "MAKE_FUNCTION"]
        codes = {i: self.instructions[i - 1].argval for i in made if (call, 1) == self._taken(i + 1, 0)}
        return any(getattr(code, "co_name", "") == "<listcomp>" for code in codes.values())

    def _taken(self, at: int, under: int) -> tuple[int | None, int]:
        """The instruction that takes the value which is ``under`` others on the stack in front of ``at``, and how many then are on it.

        None where what is computed beside it is no plain load or call.
        """
        behind = under
        while True:
            inst = self.instructions[at]
            takes = _takes(inst)
            if takes > behind:
                return at, behind
            if not (takes or _loads(inst) or inst.opname in _BESIDE or inst.opname in _NOTHING):
                return None, 0
            behind += 1 - takes if inst.opname in _MAKES_ONE else _effect(inst)
            at += 1

    def live(self, at: int, *, handlers: bool = False) -> frozenset[str]:
        """Locals that some way from ``at`` on may read before it writes them; with ``handlers`` also if exceptions are raised on the way.

        Cells are not locals here.
        """
        if handlers not in self._live:
            self._live[handlers] = self._liveness(handlers)
        return self._live[handlers][at]

    def _liveness(self, handlers: bool) -> list[frozenset[str]]:
        live: list[frozenset[str]] = [frozenset()] * len(self.instructions)
        changed = True
        while changed:
            changed = False
            for i in range(len(self.instructions) - 1, -1, -1):
                inst = self.instructions[i]
                after: frozenset[str] = frozenset().union(*(live[j] for j in self._successors(i, handlers)))
                names = frozenset(_names(inst))
                # Instructions that store and load at once count as reads only: that can only make a name live for longer.
                before = after - names if inst.opname in ("STORE_FAST", "STORE_FAST_MAYBE_NULL") else after | names
                changed = changed or before != live[i]
                live[i] = before
        return live

    def _successors(self, at: int, handlers: bool) -> list[int]:
        inst = self.instructions[at]
        out = [] if inst.opname in _ENDS or inst.opname in _ALWAYS_JUMPS else [at + 1]
        if inst.target is not None:
            out.append(self.index[id(inst.target)])
        if handlers and inst.exn_tab_entry is not None:
            out.append(self.index[id(inst.exn_tab_entry.target)])
        return [i for i in out if i < len(self.instructions)]


def empties(instructions: Sequence[Instruction], at: int) -> bool:
    """Whether the value on the stack, a list or its length, is only asked whether it is nothing: a jump, perhaps after ``> 0``."""
    rest = [inst for inst in instructions[at : at + 8] if inst.opname not in (*_NOTHING, "PRECALL", "TO_BOOL")]
    if len(rest) > 2 and rest[0].opname == "LOAD_CONST" and rest[0].argval == 0 and rest[1].opname == "COMPARE_OP":
        rest = rest[2:]
    return bool(rest) and "JUMP" in rest[0].opname and rest[0].opname.endswith(("IF_TRUE", "IF_FALSE")) and "OR_POP" not in rest[0].opname


def subscripts(inst: Instruction) -> bool:
    """Whether an instruction is ``container[index]``; from Python 3.14 on that is one of the operators with two operands."""
    return kind(inst) == "subscript"


def _takes(inst: Instruction) -> int:
    """How many values an instruction takes from the stack, of those that compute an index or an argument."""
    count = {"BUILD_TUPLE": 0, "CALL": 2, "CALL_KW": 3}.get(inst.opname)
    if count is not None:
        return int(inst.arg) + count
    return {"BINARY_SUBSCR": 2, "BINARY_OP": 2, "LOAD_ATTR": 1, "LOAD_METHOD": 1, "GET_ITER": 1}.get(inst.opname, 0)


def _effect(inst: Instruction) -> int:
    if inst.opname in ("PRECALL", "KW_NAMES"):  # what they announce CALL does
        return 0
    return dis.stack_effect(inst.opcode, inst.arg if inst.opcode >= dis.HAVE_ARGUMENT else None, jump=False)


def _loads(inst: Instruction) -> bool:
    """Whether an instruction puts plain locals or a constant on the stack, and does nothing else."""
    return inst.opname in ("LOAD_CONST", "LOAD_SMALL_INT") or (inst.opname.startswith("LOAD_FAST") and "CLEAR" not in inst.opname)


def _names(inst: Instruction) -> tuple[str, ...]:
    """The plain locals that an instruction reads, writes or deletes."""
    if "_FAST" not in inst.opname:
        return ()
    return inst.argval if isinstance(inst.argval, tuple) else (inst.argval,)
