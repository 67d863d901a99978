"""Wrong calls of the public functions: which error, and its text. Nothing is compiled here."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import moefuse


@pytest.mark.parametrize("name", ["benchmark", "compile", "explain"])
@pytest.mark.parametrize("value", [None, 3, "model", torch.ones(2)])
def test_not_callable(name: str, value: object) -> None:
    with pytest.raises(TypeError) as raised:
        getattr(moefuse, name)(value)
    assert str(raised.value) == f"moefuse.{name} needs a module or a function, got {type(value).__name__}"


def test_compile_checks_options_at_once() -> None:
    with pytest.raises(moefuse.OptionError, match="did you mean 'strict'"):
        moefuse.compile(torch.nn.Linear(2, 2), options={"strikt": True})


def test_compile_checks_modes_at_once() -> None:
    with pytest.raises(RuntimeError, match="Unrecognized mode=fast, should be one of"):
        moefuse.compile(torch.nn.Linear(2, 2), mode="fast")


def test_mode_and_options_together_is_torchs_error() -> None:
    with pytest.raises(RuntimeError) as torchs:
        torch.compile(torch.nn.Linear(2, 2), mode="max-autotune", options={"max_autotune": True})
    with pytest.raises(RuntimeError) as ours:
        moefuse.compile(torch.nn.Linear(2, 2), mode="max-autotune", options={"strict": True})
    assert str(ours.value) == str(torchs.value)


def test_an_inductor_option_of_the_wrong_type_is_torchs_error() -> None:
    with pytest.raises(RuntimeError, match="Unexpected type of attr max_autotune, got str should be bool"):
        moefuse.compile(torch.nn.Linear(2, 2), options={"max_autotune": "yes"})


def test_the_pass_takes_only_moefuse_options() -> None:
    with pytest.raises(moefuse.OptionError) as raised:
        moefuse.MoEFusionPass({"max_autotune": True})
    assert str(raised.value) == "MoEFusionPass takes moefuse's options only; give 'max_autotune' to torch.compile"


def test_public_names() -> None:
    names = ["ExpertsSpec", "FusionError", "FusionReport", "Gains", "MoEFusionPass", "OptionError", "Options", "WarmupReport"]
    names += ["CompilerError", "ParallelError", "PeerError", "RoutingError", "TooManyTokens"]
    names += ["__version__", "benchmark", "clip_grad_norm_", "compile", "compile_layers", "explain", "full_state_dict", "last_report"]
    names += ["load", "load_of", "parallelize", "capture_routing", "replay_routing", "reports", "unparallelize", "warmup"]
    assert sorted(moefuse.__all__) == sorted(names)
    assert all(getattr(moefuse, name) is not None for name in names)
    with pytest.raises(AttributeError, match="module 'moefuse' has no attribute 'fuse'"):
        _ = moefuse.fuse  # type: ignore[attr-defined]


def test_errors_have_the_documented_bases() -> None:
    assert issubclass(moefuse.OptionError, ValueError)
    assert issubclass(moefuse.FusionError, RuntimeError)
    assert issubclass(moefuse.CompilerError, RuntimeError)
    assert issubclass(moefuse.ParallelError, ValueError)
    assert issubclass(moefuse.PeerError, RuntimeError)
    assert issubclass(moefuse.TooManyTokens, moefuse.PeerError)


def test_import_is_cheap_and_touches_nothing() -> None:
    """Behind ``import torch`` it loads files of moefuse only: of the passes what is read of any graph, no compiler, no kernels."""
    program = """
import sys
import torch
before = set(sys.modules)
import moefuse
print(*(set(sys.modules) - before))
assert not torch.cuda.is_initialized()
"""
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert "moefuse.api" in loaded
    late = ("moefuse.passes", "moefuse.kernels", "moefuse.integrations.accelerate", "moefuse.integrations.transformers")
    ground = ("moefuse.passes", "moefuse.passes.graph")
    found = [name for name in loaded if not name.startswith("moefuse") or name.startswith(late)]
    assert [name for name in found if name not in ground and not name.startswith("moefuse.passes.graph.")] == []
