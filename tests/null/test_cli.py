"""``python -m moefuse``: what needs no compilation. What compiles is in tests/cpu/test_cli_explain.py."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from moefuse.capture import entry
from moefuse.cli import doctor, hugging_face, target, words
from moefuse.cli.command import CommandError
from moefuse.cli.main import RUN, main
from moefuse.kernels.triton import config
from moefuse.machine import cache_folder
from moefuse.ops.meaning.activations import ACTIVATIONS
from moefuse.runtime import native, providers
from moefuse.spec import Gating
from moefuse.tuning import store
from moefuse.tuning.measure.report import WarmupReport

MODEL = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x

class Sized(Model):
    def __init__(self, width):
        super().__init__()

def with_inputs():
    return Model(), (torch.ones(2, 3),)

def broken():
    raise ValueError("no such file\\nsecond line")

made = Model()
number = 3
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_models.py").write_text(MODEL)
    (tmp_path / "my_broken.py").write_text("import torch\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path / "cache"))


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert RUN.keys() == words.COMMANDS.keys()
    for name, (text, _) in words.COMMANDS.items():
        with pytest.raises(SystemExit) as stopped:
            main([name, "--help"])
        assert stopped.value.code == 0
        said = " ".join(capsys.readouterr().out.split())
        assert said.startswith(f"usage: python -m moefuse {name}")
        assert text[1:] in said


def test_the_words_of_the_package() -> None:
    """They are written out, as a parser that imports nothing cannot ask for them."""
    assert tuple(sorted(ACTIVATIONS)) == words.ACTIVATIONS
    assert get_args(Gating) == words.GATINGS


@pytest.mark.parametrize("argv", [[], ["explane"], ["cache"], ["cache", "burn"], ["warmup", "m:f"]])
def test_wrong_words_are_argparses(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "name one model: MODULE:NAME, or --hf PATH"),
        (["my_models:Model", "--hf", "x"], "name one model"),
        (["my_models"], "'my_models' names nothing to build: give MODULE:NAME, e.g. my_package.model:MyModel"),
        (["no_such_package.models:Model"], "no module 'no_such_package'; run this where `import no_such_package.models` works"),
        (["my_broken:Model"], "`import my_broken` fails: ZeroDivisionError: division by zero"),
        (["no/such/file.py:Model"], "there is no file no/such/file.py"),
        (["my_models.py:Model", "--html", "no/such/folder/page.html"], "page.html cannot be written: No such file or directory"),
        (["my_models:Modell"], "my_models has no 'Modell'; it has Model, Sized, with_inputs, broken"),
        (["my_models:Sized"], "my_models:Sized needs arguments (width): name a function without any that builds the model"),
        (["my_models:broken"], "my_models:broken() fails: ValueError: no such file"),
        (["my_models:number"], "my_models:number is of type int: name a model, or a class"),
        (["my_models:Model"], "my_models:Model needs inputs. Give --inputs, one word for each tensor"),
        (["my_models:Model", "--inputs", "two"], "--inputs two is no tensor. Give one word for each tensor"),
        (["my_models:Model", "--inputs", "float12:2x3"], "--inputs float12:2x3 is no tensor"),
        (["--hf", "no/such/folder"], "there is no no/such/folder: give a config.json"),
        (["--hf", ".", "--layers", "0"], "--layers 0 leaves nothing: give 1 or more"),
    ],
)
def test_explain_says_what_is_wrong(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = output(capsys, "explain", *argv)
    assert (code, out) == (2, "")
    assert err.startswith("python -m moefuse explain: ")
    assert text in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "name one model: MODULE:NAME, or --hf PATH"),
        (["my_models:Model", "--inputs", "2", "--budget", "0"], "--budget 0 is no time: give seconds"),
        (["my_models:Model", "--inputs", "2", "--budget", "nan"], "--budget nan is no time: give seconds"),
        (
            ["my_models:with_inputs", "--train"],
            "the model cannot be called with float32[2, 3]: ValueError: moefuse.benchmark: train=True",
        ),
        (["my_models.py:Model", "--html", "no/such/folder/page.html"], "page.html cannot be written: No such file or directory"),
    ],
)
def test_bench_says_what_is_wrong(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = output(capsys, "bench", *argv)
    assert (code, out) == (2, "")
    assert err.startswith("python -m moefuse bench: ")
    assert text in err
    assert "Traceback" not in err


def test_models_and_inputs() -> None:
    model, inputs = target.load("my_models:with_inputs", None)
    assert callable(model)
    assert inputs[0].tolist() == [[1.0] * 3] * 2
    assert target.load("my_models:with_inputs", ["4x2"])[1][0].shape == (4, 2)
    assert isinstance(target.load("my_models:made", ["2"])[0], torch.nn.Module)


def test_a_file_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "beside.py").write_text("WIDTH = 3\n")
    (folder / "types.py").write_text(
        "import beside\nimport torch\n\nclass Mine(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(2, beside.WIDTH)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("elsewhere/types.py:Mine", "./elsewhere/types.py:Mine", f"{folder}/types.py:Mine"):
        model, _ = target.load(name, ["1x2"])
        assert model(torch.ones(1, 2)).shape == (1, 3)
        assert sys.modules[type(model).__module__].Mine is type(model)
    assert sys.modules["types"] is types, "a file's name may be that of another module"
    with pytest.raises(CommandError, match=r"elsewhere/types\.py has no 'Yours'; it has Mine"):
        target.load("elsewhere/types.py:Yours", None)
    (folder / "lacking.py").write_text("import no_such_package\n")
    with pytest.raises(CommandError, match="no module 'no_such_package'; run this where `import no_such_package` works"):
        target.load("elsewhere/lacking.py:Model", None)


def test_a_page_that_can_be_written_is_left_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether it can is tried before the model is built, which fails here."""
    page = tmp_path / "page.html"
    assert output(capsys, "explain", "my_models:broken", "--html", str(page))[0] == 2
    assert not page.exists()
    page.write_text("an older report")
    assert output(capsys, "explain", "my_models:broken", "--html", str(page))[0] == 2
    assert page.read_text() == "an older report"


@pytest.mark.parametrize(
    ("word", "shape", "dtype", "below"),
    [("2x16", (2, 16), torch.float32, None), ("bfloat16:3", (3,), torch.bfloat16, None), ("int64:1x50:7", (1, 50), torch.int64, 7)],
)
def test_tensors_from_words(word: str, shape: tuple[int, ...], dtype: torch.dtype, below: int | None) -> None:
    made = target.tensor(word)
    assert (tuple(made.shape), made.dtype) == (shape, dtype)
    if below is not None:
        assert 2 < int(made.max()) < below
        assert int(made.min()) >= 0


class Config:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def test_a_config_is_shrunk_and_keeps_an_expert_layer() -> None:
    made = Config(
        num_hidden_layers=61, first_k_dense_replace=3, vocab_size=129280, eos_token_id=128000, layer_types=["full"] * 61, widths=[1, 2]
    )
    changed = hugging_face._shrink(made, 2)
    assert changed == ["2 of 61 layers", "1 of 3 dense ones", "1024 words"]
    assert (made.num_hidden_layers, made.first_k_dense_replace, made.vocab_size, made.eos_token_id) == (2, 1, 1024, None)
    assert (made.layer_types, made.widths) == (["full"] * 2, [1, 2])
    assert hugging_face._shrink(Config(num_hidden_layers=2, vocab_size=64), 2) == []


def test_a_model_that_does_not_fit_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face, "_free_memory", lambda: 1 << 20)
    with pytest.raises(CommandError, match=r"takes 3\.8 GiB with these layers, and 0\.0 GiB are free: give fewer --layers"):
        hugging_face._check_size(lambda: torch.nn.Linear(1000, 1_020_000), "x")
    hugging_face._check_size(lambda: torch.nn.Linear(10, 10), "x")


def test_show_and_clear_the_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cpu-kernels", "tuning", "mine"):
        (tmp_path / "cache" / name).mkdir(parents=True)
        (tmp_path / "cache" / name / "file").write_bytes(b"x" * 2048)
    code, out, _ = output(capsys, "cache", "show")
    assert code == 0
    assert out.splitlines()[0] == str(tmp_path / "cache")
    assert out.count("2 KiB") == 2
    assert output(capsys, "cache", "clear", "--keep-measurements")[1].count("removed") == 1
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == ["mine", "tuning"]
    assert output(capsys, "cache", "clear")[1].count("removed") == 1
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["mine"], "a folder of somebody else's"
    assert output(capsys, "cache", "clear")[0] == 0


def test_nothing_is_removed_behind_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tuning").symlink_to(tmp_path / "elsewhere")
    code, _, err = output(capsys, "cache", "clear")
    assert code == 2
    assert "is a link to another place" in err
    assert (tmp_path / "elsewhere" / "precious").exists()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One where everything is there; tests take something away."""
    for name in [n for n in doctor.os.environ if n.startswith("MOEFUSE_") and n != cache_folder.VARIABLE]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(doctor._torch_private, "cpp_compiler", lambda: "g++")
    monkeypatch.setattr(entry, "unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(store, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(store, "entries", lambda name: {})
    return monkeypatch


def test_doctor_finds_nothing_to_repair(machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output(capsys, "doctor", "--quick")
    assert (code, "missing" in out) == (0, False)
    assert "Everything that moefuse needs is there." in out
    assert f"NVIDIA H200 (compute capability 9.0): {len(config.table('NVIDIA H200'))} shipped configurations, 0 measured here" in out


def no_compiler() -> str:
    raise RuntimeError("none")


def with_no_gluon(module: str) -> Any:
    gluon = types.SimpleNamespace(unusable=lambda: "product_tiles: no warp_specialize", LOST="kernels with specialised warps are not used")
    return gluon if module == "launch.gluon" else "no Triton here"


MISSING = {
    "compiler": (lambda m, folder: m.setattr(doctor._torch_private, "cpp_compiler", no_compiler), "install g++ (apt-get install g++)"),
    "triton": (lambda m, folder: m.setattr(store, "triton_version", lambda: "none"), "pip install triton"),
    "gluon": (lambda m, folder: m.setattr(providers, "triton_module", with_no_gluon), "another triton may have what they need"),
    "torch": (lambda m, folder: m.setattr(torch, "__version__", "2.4.1"), "moefuse needs torch 2.11 or newer"),
    "capture": (
        lambda m, folder: m.setattr(entry, "unavailable", lambda: "capture is off"),
        "use a torch that this moefuse was tested with",
    ),
    "cache": (lambda m, folder: m.setenv(cache_folder.VARIABLE, f"{folder}/my_models.py/x"), "cannot be written: Not a directory; let"),
    "unknown variable": (lambda m, folder: m.setenv("MOEFUSE_CASHE_DIR", "x"), "MOEFUSE_CASHE_DIR means nothing to moefuse"),
    "space": (
        lambda m, folder: m.setenv("TORCHINDUCTOR_CACHE_DIR", f"{folder}/a b"),
        "name a folder without a space",
    ),
    "illegal value": (lambda m, folder: m.setenv("MOEFUSE_VERIFY", "always"), "use probe or graph or off"),
}


@pytest.mark.parametrize("what", MISSING)
def test_doctor_says_how_to_repair(what: str, machine: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    take_away, repair = MISSING[what]
    take_away(machine, tmp_path)
    code, out, _ = output(capsys, "doctor", "--quick")
    assert code == 1
    assert out.count("missing ") == 1
    assert repair in out
    assert out.endswith("1 to repair\n")


def test_doctor_without_a_gpu_is_no_fault(machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine.setattr(torch.cuda, "is_available", lambda: False)
    code, out, _ = output(capsys, "doctor", "--quick")
    assert code == 0
    assert "note     GPU            none" in out


def test_doctor_reports_kernels_that_do_not_compile(machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine.setattr(native, "ready", lambda unit: False)
    machine.setattr(native.UNITS["infer"], "failure", "g++: internal error")
    machine.setattr(native, "problem", lambda: None)
    code, out, _ = output(capsys, "doctor")
    assert code == 1
    assert "cannot be compiled: g++: internal error" in out


SIZES = ["--experts", "8", "--top-k", "2", "--hidden", "64", "--intermediate", "48"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--tokens", "1,8"], "name a model (MODULE:NAME), or its sizes (--experts, --top-k, --hidden, --intermediate)"),
        (["my_models:Model", *SIZES, "--tokens", "1"], "name a model (MODULE:NAME), or its sizes"),
        (["--experts", "8", "--tokens", "1"], "sizes are missing: give all of --experts, --top-k, --hidden, --intermediate"),
        ([*SIZES, "--tokens", "one"], "--tokens one are no numbers: give them with commas between, e.g. 1,8,512"),
        ([*SIZES, "--tokens", "0"], "tokens"),
    ],
)
def test_warmup_says_what_is_wrong(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = output(capsys, "warmup", *argv)
    assert (code, out) == (2, "")
    assert text in err


def test_warmup_of_sizes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []

    def warmup(what: Any, tokens: list[int], **options: Any) -> WarmupReport:
        seen.extend((what, tokens, options))
        return WarmupReport()

    monkeypatch.setattr("moefuse.cli.warmup.warmup", warmup)
    code, out, err = output(capsys, "warmup", *SIZES, "--tokens", "1,512", "--budget", "5", "--gating", "split", "--dtype", "float16")
    assert (code, err) == (0, "")
    assert out.startswith("moefuse: measured 0 of 0")
    spec, tokens, options = seen
    assert str(spec) == "E=8 K=2 H=64 I=48 float16 silu gating=split weights=stacked out-in"
    assert (tokens, options) == ([1, 512], {"budget_s": 5.0, "progress": False})
