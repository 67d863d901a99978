"""Options: legal values, where defaults come from, and the text of every error."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch._inductor
from hypothesis import given, strategies as st

import moefuse
from moefuse import OptionError, Options
from moefuse.config import ENVIRONMENT, SWITCHES
from moefuse.machine import environment
from moefuse.runtime import overlap
from moefuse.tuning import store

WORDS = " (or false, no, off, true, yes, on)"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*ENVIRONMENT, *SWITCHES):
        monkeypatch.delenv(variable, raising=False)


def test_defaults() -> None:
    assert Options.from_user(None) == (Options(), {})
    assert Options() == Options(verify="probe", strict=False, exclude=None, max_rewrites=None, enabled=True, capture=True)


def test_own_options_are_taken_and_inductor_keeps_the_rest() -> None:
    own, rest = Options.from_user({"strict": True, "max_autotune": True, "epilogue-fusion": False})
    assert own == Options(strict=True)
    assert rest == {"max_autotune": True, "epilogue-fusion": False}


def test_no_name_means_two_things() -> None:
    names = {field.name for field in dataclasses.fields(Options)}
    assert names.isdisjoint(torch._inductor.list_options())


def test_the_callers_dict_is_left_alone() -> None:
    options = {"strict": True}
    Options.from_user(options)
    assert options == {"strict": True}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"verify": "fast"}, "option verify='fast' is not legal; use 'probe' or 'graph' or 'off'"),
        ({"verify": ["off"]}, "option verify=['off'] is not legal; use 'probe' or 'graph' or 'off'"),
        ({"strict": 1}, "option strict=1 is not legal; use True or False"),
        ({"enabled": "yes"}, "option enabled='yes' is not legal; use True or False"),
        ({"max_rewrites": -1}, "option max_rewrites=-1 is not legal; use a non-negative integer or None"),
        ({"max_rewrites": True}, "option max_rewrites=True is not legal; use a non-negative integer or None"),
        ({"max_rewrites": "2"}, "option max_rewrites='2' is not legal; use a non-negative integer or None"),
        (
            {"exclude": 3},
            r"option exclude=3 is not legal; use a regular expression for module paths, e.g. r'layers\.0\.', or None",
        ),
        (
            {"exclude": "("},
            r"option exclude='(' is not legal; use a regular expression for module paths, e.g. r'layers\.0\.', or None "
            "(missing ), unterminated subpattern at position 0)",
        ),
        (
            {"strikt": True},
            "unknown option 'strikt' (did you mean 'strict'?); "
            "moefuse's options are any_size, capture, cost_gate, enabled, exclude, expect, fuse_router, max_rewrites, overlap, quantised, "
            "recompute, router_topk, strict, verify; Inductor's options are accepted too, see torch._inductor.list_options()",
        ),
        (
            {"max_autotun": True},
            "unknown option 'max_autotun' (did you mean 'max_autotune'?); "
            "moefuse's options are any_size, capture, cost_gate, enabled, exclude, expect, fuse_router, max_rewrites, overlap, quantised, "
            "recompute, router_topk, strict, verify; Inductor's options are accepted too, see torch._inductor.list_options()",
        ),
        (
            {7: True},
            "unknown option 7; moefuse's options are any_size, capture, cost_gate, enabled, exclude, expect, fuse_router, max_rewrites, "
            "overlap, quantised, recompute, router_topk, strict, verify; "
            "Inductor's options are accepted too, see torch._inductor.list_options()",
        ),
        (["strict"], "options must be a dict, got list"),
    ],
)
def test_error_text(options: object, text: str) -> None:
    with pytest.raises(OptionError) as raised:
        Options.from_user(options)  # type: ignore[arg-type]
    assert str(raised.value) == text


def test_a_typing_error_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="did you mean 'verify'"):
        Options.from_user({"verfiy": "off"})


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("MOEFUSE_DISABLE", "1", Options(enabled=False)),
        ("MOEFUSE_DISABLE", "0", Options()),
        ("MOEFUSE_VERIFY", "off", Options(verify="off")),
        ("MOEFUSE_VERIFY", "probe", Options()),
        ("MOEFUSE_VERIFY", "graph", Options(verify="graph")),
        ("MOEFUSE_STRICT", "1", Options(strict=True)),
        ("MOEFUSE_STRICT", "0", Options()),
        *(("MOEFUSE_STRICT", text, Options(strict=True)) for text in ("true", "True", "yes", "on", "ON")),
        *(("MOEFUSE_CAPTURE", text, Options(capture=False)) for text in ("false", "FALSE", "no", "off")),
        ("MOEFUSE_DISABLE", "yes", Options(enabled=False)),
        ("MOEFUSE_CPU_KERNEL", "off", Options()),
    ],
)
def test_environment(monkeypatch: pytest.MonkeyPatch, variable: str, text: str, expected: Options) -> None:
    monkeypatch.setenv(variable, text)
    assert Options.from_user({}) == (expected, {})


def test_written_options_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFUSE_VERIFY", "off")
    assert Options.from_user({"verify": "probe"})[0] == Options()


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("MOEFUSE_DISABLE", "y", f"environment variable MOEFUSE_DISABLE='y' is not legal; use '0' or '1'{WORDS}"),
        ("MOEFUSE_VERIFY", "", "environment variable MOEFUSE_VERIFY='' is not legal; use 'probe' or 'graph' or 'off'"),
        ("MOEFUSE_VERIFY", "no", "environment variable MOEFUSE_VERIFY='no' is not legal; use 'probe' or 'graph' or 'off'"),
        ("MOEFUSE_STRICT", "", f"environment variable MOEFUSE_STRICT='' is not legal; use '0' or '1'{WORDS}"),
        ("MOEFUSE_CPU_KERNEL", "2", f"environment variable MOEFUSE_CPU_KERNEL='2' is not legal; use '0' or '1'{WORDS}"),
    ],
)
def test_environment_error_text(monkeypatch: pytest.MonkeyPatch, variable: str, text: str, message: str) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(OptionError) as raised:
        Options.from_user(None)
    assert str(raised.value) == message


@pytest.mark.parametrize("text", ["0", "false", "No", "OFF"])
def test_switches_read_the_same_words(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    assert not environment.is_off("MOEFUSE_OVERLAP")
    monkeypatch.setenv("MOEFUSE_OVERLAP", text)
    assert environment.is_off("MOEFUSE_OVERLAP")
    assert not overlap.enabled()
    monkeypatch.setenv(store.SWITCH, text)
    assert not store.enabled()


def test_an_unknown_variable_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFUSE_STRIKT", "1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            Options.from_user(None)
    texts = [str(warning.message) for warning in caught]
    known = "MOEFUSE_DISABLE, MOEFUSE_VERIFY, MOEFUSE_STRICT, MOEFUSE_CAPTURE, MOEFUSE_CPU_KERNEL, "
    known += "MOEFUSE_AUTOTUNE, MOEFUSE_OVERLAP, MOEFUSE_DIRECT_LAUNCH, MOEFUSE_SPECIALISED, MOEFUSE_WORKSPACE_MIB, MOEFUSE_CACHE_DIR, "
    known += "MOEFUSE_HOST"
    assert texts == [f"environment variable MOEFUSE_STRIKT is unknown to moefuse; it reads {known}"]


def options() -> st.SearchStrategy[Options]:
    return st.builds(
        Options,
        verify=st.sampled_from(["probe", "graph", "off"]),
        strict=st.booleans(),
        exclude=st.sampled_from([None, "", "a", "None", "layers"]),
        max_rewrites=st.none() | st.integers(0, 3),
        enabled=st.booleans(),
    )


@given(options(), options())
def test_fingerprints_differ_exactly_when_options_do(a: Options, b: Options) -> None:
    assert (a.fingerprint() == b.fingerprint()) == (a == b)


def test_options_are_public() -> None:
    assert moefuse.Options is Options
