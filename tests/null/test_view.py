"""A report as a page: self-contained, well-formed, and it says what the report says. Chromium opens it where it is installed."""

from __future__ import annotations

import html.parser
import re
import shutil
import subprocess
from pathlib import Path
from runpy import run_path

import pytest
from torch import nn

from moefuse.errors import CODES
from moefuse.program.module_tree import tree_of
from moefuse.program.steps import Run, fold
from moefuse.report.entries import Fused, Skipped, amount
from moefuse.report.page import advice, weight_bytes
from moefuse.report.page_drawing import LONGEST, drawing
from moefuse.report.page_source import excerpt
from moefuse.report.report import FusionReport
from moefuse.spec import ExpertsSpec

ROOT = Path(__file__).parent.parent.parent
SPEC = ExpertsSpec(8, 2, 64, 48, "bfloat16", "silu")
VOID = {"meta", "br", "line", "rect", "path"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(4, 4), nn.Linear(4, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(4, 4), nn.ModuleList(Layer() for _ in range(6))


def fused(layer: int) -> Fused:
    loop = (Run(("view", "one_hot")), Run(("eq", "where", "linear"), 128), Run(("index_add_",)))
    return Fused(
        f"layers.{layer}.mlp", "/no/such/file.py:12", SPEC, "selected", "fused", 0.3, before=loop, after=(Run(("moefuse::experts",)),)
    )


REPORT = FusionReport(
    [fused(layer) for layer in (0, 1, 2, 4, 5)],
    [Skipped("random", "`dropout` draws <random> numbers & more", "layers.3.mlp", f"{__file__}:40")],
    graph_count=2,
    graph_breaks=["Dynamic shape operator at /no/such/file.py:3"],
    notes=["a note about `x`"],
    modules=(("", tree_of(Model())),),
)
REPORTS = {"full": REPORT, "empty": FusionReport(), "no tree": FusionReport([fused(0)], graph_count=1)}


class Reader(html.parser.HTMLParser):
    """Whether elements are closed in order, and what they load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.problems: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        self.problems += [f"<{name}> is not closed" for name in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        loads = {"script", "link", "img", "iframe", "object", "embed", "base", "use", "image", "video", "audio"}
        self.problems += [f"<{tag}>"] if tag in loads else []
        self.problems += [
            f"{name}={value}"
            for name, value in attrs
            if name in ("src", "href", "xlink:href", "srcset", "style") and ":" in (value or "") and not (value or "").startswith("width:")
        ]
        self.problems += [f"{name}=..." for name, _ in attrs if name.startswith("on")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("name", REPORTS)
def test_the_page_is_self_contained_and_well_formed(name: str) -> None:
    for text in (REPORTS[name].to_html(), REPORTS[name]._repr_html_()):
        assert Reader(text).problems == []
        assert not re.search(
            r"https?://|//\w|@import|@font-face|<script|url\((?!#)", re.sub(r"<!DOCTYPE[^>]*>", "", text).replace("/no/such", "")
        )


def test_the_reader_finds_what_it_looks_for() -> None:
    bad = '<p><b></p></b><img src="http://a/b.png"><a href="https://a">x</a><p onclick="y">'
    assert {"<img>", "src=http://a/b.png", "href=https://a", "onclick=...", "</p> closes nothing"} <= set(Reader(bad).problems)


def test_the_page_says_what_the_report_says() -> None:
    text = "".join(Reader(REPORT.to_html()).text)
    for part in (
        "Fused 5 of 6 MoE layers",
        "layers.*.mlp (5 layers)",
        "dropout draws <random> numbers & more",
        "moefuse::experts",
        "a note about x",
    ):
        assert part in text, part
    assert "before: 387 operations" in text
    assert "144 KiB in each layer" in text
    assert advice()["random"].replace("`", "") in text


def test_equal_layers_are_one_line_of_the_tree_and_the_refused_one_stands_out() -> None:
    text = re.sub(r"\s+", " ", "".join(Reader(REPORT.to_html()).text))
    assert "0 … 2 Layer" in text
    assert "3 Layer" in text
    assert "4 … 5 Layer" in text
    assert "mlp random Linear" in text


def test_a_notebook_gets_a_part_of_a_page() -> None:
    text = REPORT._repr_html_()
    assert text.startswith('<div class="moefuse">')
    assert "<body" not in text
    rules = re.findall(r"^([^@{}\n]+)\{", text[text.index("<style>") + 7 : text.index("</style>")], flags=re.MULTILINE)
    assert rules
    assert all(selector.strip().startswith(".moefuse") for rule in rules for selector in rule.split(",")), (
        "a rule would change the notebook"
    )


def test_the_file_is_the_page(tmp_path: Path) -> None:
    REPORT.save_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == REPORT.to_html()


def test_advice_is_that_of_the_documentation() -> None:
    """After an edit of docs/refusals.md: python docs/advice.py."""
    assert advice() == run_path(str(ROOT / "docs/advice.py"))["advice"]()
    assert set(advice()) == set(CODES)


def test_the_statement_is_marked_among_its_neighbours(tmp_path: Path) -> None:
    path = tmp_path / "my.py"
    path.write_text("".join(f"    line_{number} < {number}\n" for number in range(1, 10)))
    text = excerpt(f"{path}:5")
    assert re.findall(r"line_(\d)", text) == list("2345678")
    assert "line_5 &lt; 5" in text[text.index("<mark>") : text.index("</mark>")]
    assert excerpt(f"{path}:99") == ""
    assert excerpt(f"{tmp_path / 'gone.py'}:1") == ""
    assert excerpt("") == ""


@pytest.mark.parametrize(
    ("names", "runs"),
    [
        ("", []),
        ("a b c", [("a b c", 1)]),
        ("a b c b c d", [("a", 1), ("b c", 2), ("d", 1)]),
        ("a b a b a b", [("a b", 3)]),
        ("x y y y y", [("x", 1), ("y", 4)]),
        ("x y y z", [("x y y z", 1)]),
        ("a a b a a b", [("a a b", 2)]),
    ],
)
def test_what_repeats_is_said_once(names: str, runs: list[tuple[str, int]]) -> None:
    assert fold(tuple(names.split())) == tuple(Run(tuple(part.split()), times) for part, times in runs)


def test_a_long_region_is_abridged() -> None:
    names = [f"op{n}" for n in range(40)]
    text = drawing((Run(tuple(names)),), (Run(("moefuse::experts",)),))
    shown = re.findall(r">(op\d+)<", text)
    half = LONGEST // 2
    assert shown == [*names[:half], *names[-half:]]
    assert f"… {40 - 2 * half} more" in text
    assert drawing((), (Run(("a",)),)) == ""


def test_a_tree_holds_no_module_and_shares_what_is_equal() -> None:
    root = tree_of(Model())
    layers = dict(root.children)["layers"]
    assert len({id(child) for _, child in layers.children}) == 1
    assert root.size == sum(p.numel() * 4 for p in Model().parameters())


def test_sizes() -> None:
    assert weight_bytes(SPEC) == 8 * 48 * (2 * 64 + 64) * 2
    assert weight_bytes(ExpertsSpec(8, 2, 64, 48, "float32", "gelu", gating="plain")) == 8 * 48 * 2 * 64 * 4
    assert [amount(n) for n in (12, 2048, 147456, 5 << 30)] == ["12 bytes", "2 KiB", "144 KiB", "5 GiB"]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install it to look at the page with a browser")
def test_a_browser_lays_it_out(tmp_path: Path) -> None:
    """The pictures are not blank, and light and dark differ."""
    REPORT.save_html(tmp_path / "report.html")
    shots = {}
    for name, flags in {"light": [], "dark": ["--blink-settings=preferredColorScheme=0"]}.items():
        shots[name] = tmp_path / f"{name}.png"
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
        command += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path / f'user-{name}'}"]
        command += [*flags, "--window-size=800,1200", f"--screenshot={shots[name]}", f"file://{tmp_path / 'report.html'}"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert all(shot.stat().st_size > 20_000 for shot in shots.values())
    assert shots["light"].read_bytes() != shots["dark"].read_bytes()
