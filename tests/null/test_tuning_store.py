"""The user's file of measurements: what is written is read, and nothing else that may lie there does harm."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import stat
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from moefuse.kernels.triton.config import choose, rules, specialised_tiles, table
from moefuse.machine import cache_folder
from moefuse.tuning import entries, store
from moefuse.tuning.entries import Entry, InvalidEntryError, Pair
from moefuse.tuning.problem import Config, Problem, Tiles, Vectors

GPU = "NVIDIA H200"
P = Problem(60, 2, 8, 256, 128, 256, "merged", "bfloat16")
CONFIG = Config(32, Tiles(64, 64, 4, 4, swap=True), Tiles(64, 128, 4, 3), pdl=True)
NAME = "selected:0123456789ab"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path))
    monkeypatch.delenv(store.SWITCH, raising=False)


def entry(tokens: int = 60, when: int = 1, **more: Any) -> Entry:
    return Entry(dataclasses.replace(P, tokens=tokens), **{"config": CONFIG, "us": 12.5, "when": when, **more})


def test_what_is_saved_is_found_for_its_bucket() -> None:
    """T*K/E of 60 tokens is 15: the bucket is 8 (not included) to 16."""
    path = store.save(GPU, [entry(programs={NAME: Pair(20.0, 12.0, 60)})])
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for tokens, there in ((32, False), (33, True), (60, True), (64, True), (65, False)):
        found = store.find(GPU, dataclasses.replace(P, tokens=tokens))
        assert (found == entry(programs={NAME: Pair(20.0, 12.0, 60)})) is there
    assert store.comparison(GPU, P, NAME) == Pair(20.0, 12.0, 60)
    assert store.comparison(GPU, P, "dense:0123456789ab") is None
    assert store.find("NVIDIA A100", P) is None
    assert [p.name for p in path.parent.iterdir() if p.suffix == ".tmp"] == []


@pytest.mark.parametrize("change", [{"top_k": 4, "experts": 16}, {"hidden": 512}, {"dtype": "float16"}, {"separate": True}], ids=str)
def test_other_sizes_are_another_problem(change: dict[str, Any]) -> None:
    store.save(GPU, [entry()])
    assert store.find(GPU, dataclasses.replace(P, **change)) is None


def test_buckets() -> None:
    """Of T*K/E, not of T: a power of two is the end of its bucket."""
    for (tokens, top_k, experts), bucket in {
        (1, 8, 128): -4,
        (1, 1, 1): 0,
        (3, 1, 1): 2,
        (4, 1, 1): 2,
        (5, 1, 1): 3,
        (64, 8, 128): 2,
    }.items():
        assert dataclasses.replace(P, tokens=tokens, top_k=top_k, experts=experts).bucket == bucket


def test_a_call_takes_what_was_measured() -> None:
    limit = 227 << 10
    before = choose(P, GPU, True, limit, 2)
    store.save(GPU, [entry()])
    assert choose(P, GPU, True, limit, 2) == CONFIG != before
    # Through `fit`, like every other choice.
    small = choose(P, GPU, True, 20 << 10, 2)
    assert small != CONFIG
    assert small.bm == CONFIG.bm


def test_vectors_are_not_used_for_many_more_slots_than_measured() -> None:
    """They read an expert once for every slot, so a bucket is too wide for them."""
    vectors = Config(0, Vectors(), Vectors())
    store.save(GPU, [entry(tokens=33, config=vectors)])
    assert choose(dataclasses.replace(P, tokens=40), GPU, True, 227 << 10, 2) == vectors
    assert choose(dataclasses.replace(P, tokens=64), GPU, True, 227 << 10, 2) != vectors


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(GPU, [entry(programs={NAME: Pair(1.0, 2.0, 60)})])
    assert store.fingerprint(GPU)
    monkeypatch.setenv(store.SWITCH, "0")
    assert store.find(GPU, P) is None
    assert store.comparison(GPU, P, NAME) is None
    assert store.fingerprint(GPU) == ""
    assert choose(P, GPU, True, 227 << 10, 2) != CONFIG


def test_the_newer_configuration_and_every_comparison_stay() -> None:
    other = "sorted:ba9876543210"
    store.save(GPU, [entry(when=5, us=9.0, programs={NAME: Pair(1.0, 2.0, 60)})])
    store.save(GPU, [entry(when=3, us=7.0, programs={NAME: Pair(5.0, 2.0, 60), other: Pair(3.0, 4.0, 60)})])
    store.save(GPU, [entry(tokens=500)])
    found = store.find(GPU, P)
    assert found is not None
    assert (found.us, found.programs) == (9.0, {NAME: Pair(1.0, 2.0, 60), other: Pair(3.0, 4.0, 60)})
    assert len(store.entries(GPU)) == 2


def test_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_ENTRIES", 2)
    for when, tokens in ((3, 1), (1, 100), (2, 1000)):
        store.save(GPU, [entry(tokens, when)])
    assert sorted(e.when for e in store.entries(GPU).values()) == [2, 3]


def test_nobody_elses_folder_is_read(caplog: pytest.LogCaptureFixture) -> None:
    path = store.save(GPU, [entry()])
    path.parent.chmod(0o777)
    os.utime(path, (1, 1))
    with caplog.at_level(logging.WARNING):
        assert store.find(GPU, P) is None
        assert store.find(GPU, P) is None
    assert [r.message.split(": ", 1)[1] for r in caplog.records] == [
        f"{path.parent} belongs to somebody else, or others can write to it; nothing is loaded from there"
    ]


def test_looking_makes_no_folder(tmp_path: Path) -> None:
    assert store.find(GPU, P) is None
    assert list(tmp_path.iterdir()) == []


def change(**more: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda data: {**data, **more}


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda data: {k: v for k, v in data.items() if k != name}


FILES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another device": (change(device="NVIDIA A100"), "device is 'NVIDIA A100', here it is 'NVIDIA H200'"),
    "another triton": (change(triton="1.0"), "triton is '1.0'"),
    "other kernels": (change(kernels="0"), "kernels is '0'"),
    "another format": (change(format=True), "format is True, here it is 1"),
    "unknown field": (change(code="import os"), "not a file of measurements"),
    "missing field": (without("triton"), "not a file of measurements"),
    "entries": (change(entries={}), "not a file of measurements"),
    "a list": (lambda data: [data], "not a file of measurements"),
    "a number": (lambda data: 3, "not a file of measurements"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_ignored(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """One line in the log, no error, and the next save puts a good file in its place."""
    path = store.save(GPU, [entry()])
    damage, text = FILES[case]
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    with caplog.at_level(logging.WARNING):
        assert [store.find(GPU, P) for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert record.message.startswith(f"measurements in {path} are ignored: ")
    assert text in record.message
    store.save(GPU, [entry()])
    assert store.find(GPU, P) == entry()


@pytest.mark.parametrize("text", ["", "{", "\0", "[" * 100000, "NaN", '{"entries": 1' + "0" * 9999 + "}", "\ud800"[:0] + "\xff"])
def test_texts_that_are_no_json(text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = store.save(GPU, [entry()])
    path.write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        assert store.find(GPU, P) is None
    assert len(caplog.records) == 1


def at(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of nested data with one value replaced (removed for `...`)."""
    head, *rest = path
    copy = dict(data)
    if not rest and value is ...:
        del copy[head]
    else:
        copy[head] = value if not rest else at(copy.get(head, {}), tuple(rest), value)
    return copy


WRONG: list[tuple[tuple[str, ...], Any]] = [
    *((("problem", name), value) for name in ("tokens", "top_k", "experts") for value in (0, -1, 1 << 60, True, 1.0, "1", None, [])),
    *((("problem", "hidden"), value) for value in (-1, 1.5, "x", ...)),
    *((("problem", "gating"), value) for value in ("", "x" * 100, 3, "unknown", ...)),
    *((("problem", "dtype"), value) for value in ("int", "nn", "__builtins__", "os.system", 3)),
    *((("problem", "separate"), value) for value in (0, 1, "true", None, ...)),
    (("problem", "more"), 1),
    *((("config", "bm"), value) for value in (-16, 24, 1 << 20, True, 16.0, None, ...)),
    *((("config", "up", name), value) for name in ("bn", "bk", "warps") for value in (0, -64, 48, 1 << 20, True, 64.0, "64", None, ...)),
    *((("config", "up", "stages"), value) for value in (-1, 99, 2.0)),
    *((("config", "down", "swap"), value) for value in (0, 1, "no", None, ...)),
    (("config", "down", "more"), 1),
    (("config", "up"), []),
    (("config", "pdl"), 1),
    (("config", "more"), 1),
    *((("us",), value) for value in (0, -1.0, float("nan"), float("inf"), 1e30, True, "1", None, ...)),
    *((("when",), value) for value in (-1, 1.5, True, None, ...)),
    *(
        (("library",), value)
        for value in ([], None, {"../x": 1.0}, {"all": 0}, {"all": "1"}, {"": 1.0}, dict.fromkeys("abcdefghi", 1.0), ...)
    ),
    *((("programs",), value) for value in ([], None, 1, {"x": 1}, {"../../x": {}}, ...)),
    *((("programs", NAME, name), value) for name in ("program_us", "fused_us", "tokens") for value in (0, -1, "1", True, None, ...)),
    (("programs", NAME, "more"), 1),
    (("programs", NAME + "\n"), {"program_us": 1.0, "fused_us": 1.0, "tokens": 1}),
    (("more",), 1),
]


@pytest.mark.parametrize(("where", "value"), WRONG, ids=str)
def test_entries_that_are_ignored(where: tuple[str, ...], value: Any) -> None:
    good = json.loads(json.dumps(entry(programs={NAME: Pair(20.0, 12.0, 60)}).to_json()))
    assert entries.parse(good) == entry(programs={NAME: Pair(20.0, 12.0, 60)})
    with pytest.raises(InvalidEntryError):
        entries.parse(at(good, where, value))


def test_a_bad_entry_does_not_hide_the_good_ones(caplog: pytest.LogCaptureFixture) -> None:
    path = store.save(GPU, [entry(), entry(tokens=500), entry(tokens=5000)])
    data = json.loads(path.read_text())
    data["entries"][0]["us"] = -1
    data["entries"][1] = None
    path.write_text(json.dumps(data))
    with caplog.at_level(logging.WARNING):
        assert len(store.entries(GPU)) == 1
    assert [r.message for r in caplog.records] == [f"2 measurements in {path} are ignored, the first because us is -1"]


_LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
_JSON = st.recursive(_LEAF, lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=20)
_FIELDS = ["problem", "config", "us", "library", "programs", "when"]


@given(st.one_of(_JSON, st.fixed_dictionaries(dict.fromkeys(_FIELDS, _JSON))))
def test_any_data_is_an_entry_or_refused(data: Any) -> None:
    with contextlib.suppress(InvalidEntryError):
        assert entries.parse(data).to_json() == data


def test_every_setting_of_a_kernel_can_be_kept() -> None:
    """A field of another type would make every stored configuration invalid, silently."""
    for kind in (Tiles, Vectors):
        hints = typing.get_type_hints(kind)
        assert [f.name for f in dataclasses.fields(kind) if hints[f.name] not in (bool, int, float, str)] == []


def test_what_ships_and_what_the_rules_say_can_be_kept() -> None:
    """The bounds are wide enough for every configuration there is."""
    found = [c for specialised in (False, True) for _, c in table(GPU, specialised)]
    for tokens in (1, 3, 8, 64, 512, 4096, 16384):
        for dtype in ("bfloat16", "float32", "float64"):
            found += [rules(dataclasses.replace(P, tokens=tokens, dtype=dtype), hopper) for hopper in (False, True)]
            found.append(rules(dataclasses.replace(P, tokens=tokens, dtype=dtype), True, specialised=True))
    for config in found:
        assert entries.config_from(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("bm", "changes"),
    [(64, {}), (16, {}), (128, {"bk": 128}), (128, {"store": 8}), (128, {"specialised": "other"}), (128, {"rows_desc": False})],
)
def test_tiles_that_no_specialised_kernel_has(bm: int, changes: dict[str, Any]) -> None:
    """They would hang or fail to compile: an entry that was tampered with is refused when it is read."""
    good = specialised_tiles(dataclasses.replace(P, tokens=4096), 128, "shared")
    assert entries.config_from(json.loads(json.dumps(good.to_json()))) == good
    bad = dataclasses.replace(good, bm=bm, up=dataclasses.replace(good.up, **changes))
    with pytest.raises(InvalidEntryError, match="no such tiles"):
        entries.config_from(json.loads(json.dumps(bad.to_json())))


def test_the_quickest_form() -> None:
    assert entry(us=12.5).form is None
    assert entry(us=12.5, library={"all": 12.5, "down": 13.0}).form is None
    assert entry(us=12.5, library={"all": 12.0, "down": 11.0}).form == "down"
    again = entries.parse(json.loads(json.dumps(entry(library={"all": 12.0}).to_json())))
    assert again == entry(library={"all": 12.0})


def test_times_of_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Entries may carry the time of the compiled grouped program; those without say nothing of it, and choose all the same."""
    from moefuse.kernels.triton import config as configs

    data = [
        {"problem": dataclasses.asdict(P), "us": 12.0, "peer_us": 10.5, "config": CONFIG.to_json(), "grouped_mm": {"all": 11.0}},
        {"problem": dataclasses.asdict(dataclasses.replace(P, tokens=8)), "us": 3.0, "config": CONFIG.to_json()},
    ]
    (tmp_path / "table.json").write_text(json.dumps({"entries": data}))
    monkeypatch.setattr(configs, "_table_path", lambda device: tmp_path / "table.json")
    assert configs.table_times.__wrapped__("a device") == ((P, 11.0, 10.5),)
    assert len(configs.table.__wrapped__("a device")) == 2
    monkeypatch.setattr(configs, "_table_path", lambda device: tmp_path / "none.json")
    assert configs.table_times.__wrapped__("a device") == ()


WRITERS = """
import dataclasses, os
from moefuse.tuning import store
from tests.null.test_tuning_store import GPU, P, entry

def write(first):
    for i in range(8):
        problem = dataclasses.replace(P, hidden=8 * (first + i))
        store.save(GPU, [dataclasses.replace(entry(), problem=problem)])

children = []
go, wait = os.pipe()
for first in (1, 101, 201, 301):
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(wait)
            os.read(go, 1)  # all start when the parent has closed its end
            write(first)
            code = 0
        finally:
            os._exit(code)
    children.append(child)
os.close(wait)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
"""
"""Forks, as importing torch four times is what takes time."""


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", WRITERS], cwd=root, env=environment, check=True)
    assert len(store.entries(GPU)) == 32
    assert [p.name for p in store.path_of(GPU).parent.iterdir() if p.suffix == ".tmp"] == []
