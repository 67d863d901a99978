"""``moefuse.compile_layers``: one graph for all layers of a kind and all sizes, as a server has them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as fx
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import moefuse
from moefuse import _torch_private
from moefuse.evidence.layers import layers_of
from tests.dist import layers
from tests.programs.effects.changes import H, Plain
from tests.zoo import tiny

SIZES = (5, 3, 1, 7, 0, 2)
"""Tokens; the graph is made for the first number."""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    yield
    assert not fx.backed_size_oblivious


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


class Around(nn.Module):
    """Ten layers, more than torch compiles graphs of one code."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(layers.H), nn.ModuleList(kind(4) for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return x


@pytest.mark.code_elsewhere
@pytest.mark.parametrize("kind", [layers.Stacked, layers.Listed])
def test_one_graph_for_all_layers_and_sizes(kind: type[nn.Module]) -> None:
    model = Around(kind)
    plain, names = copy.deepcopy(model), list(model.state_dict())
    assert moefuse.compile_layers(model) == [f"layers.{i}" for i in range(10)]
    assert list(model.state_dict()) == names
    with torch.no_grad():
        for tokens in SIZES:
            x = torch.randn(tokens, layers.H)
            torch.testing.assert_close(model(x), plain(x))
    assert graphs() == 1
    assert [report.layers for report in moefuse.reports()] == [(10, 10)]
    assert {f.module for f in moefuse.last_report().fused} == {f"layers.{i}" for i in range(10)}


@pytest.mark.usefixtures("no_code")
def test_routing_by_layer() -> None:
    """Layers that share a graph have their own names in what is captured, and take ids that a whole model was given."""
    model = Around(layers.Stacked)
    x, whole = torch.randn(5, layers.H), copy.deepcopy(model)
    names = moefuse.compile_layers(model)
    whole.compile(backend="moefuse")
    with torch.no_grad():
        with moefuse.capture_routing(model) as routing:
            expected = model(x)
        assert list(routing) == names
        other = {name: [ids.flip(0) for ids in calls] for name, calls in routing.items()}
        for each in (model, whole):
            with moefuse.replay_routing(each, routing):
                torch.testing.assert_close(each(x), expected)
            with moefuse.replay_routing(each, [calls[0] for calls in other.values()]):
                found = each(x)
            with moefuse.replay_routing(each, other):
                assert torch.equal(each(x), found)
            assert not torch.allclose(found, expected)


@pytest.mark.usefixtures("no_code")
def test_training() -> None:
    """As torch compiles it: one graph for 0, for 1, and for more tokens, where these have a gradient (behind the first layer) or not."""
    model = Around(layers.Stacked).double()
    plain = copy.deepcopy(model)
    moefuse.compile_layers(model)
    for tokens in SIZES:
        x = torch.randn(tokens, layers.H, dtype=torch.float64)
        for one in (model, plain):
            one.zero_grad()
            one(x).square().sum().backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=lambda text, name=name: f"{name}: {text}")
    assert graphs() <= 6


@pytest.mark.parametrize("train", [True, False])
def test_strides_of_every_kind(train: bool, request: pytest.FixtureRequest) -> None:
    """In the order in which a backward that was made for one of them was run for another, which only Inductor's code notices."""
    if not train:
        request.getfixturevalue("as_traced")
    model = layers.Stacked(4).double()
    plain = copy.deepcopy(model)
    moefuse.compile_layers(model)
    h, shapes = layers.H, [(7, layers.H), (layers.H, 7), (5, 2 * layers.H), (1, layers.H), (10, layers.H), (layers.H, layers.H)]
    a, b, c, d, e, f = (torch.randn(*shape, dtype=torch.float64) for shape in shapes)
    for x in (b.t(), a, d.expand(5, h), c[:, ::2], d, d.t().contiguous().t(), e[::2], f.t(), d.expand(1, h), c[:0, ::2], a[:1]):
        with torch.set_grad_enabled(train):
            wanted, got = plain(x), model(x)
        torch.testing.assert_close(got, wanted)
        if train:
            for one, out in ((model, got), (plain, wanted)):
                one.zero_grad()
                out.square().sum().backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.usefixtures("as_traced")
def test_three_dimensions() -> None:
    """[B, S, H] in every order of 1 and more, with gradients and without."""
    model = Sequences(4)
    plain = copy.deepcopy(model)
    moefuse.compile_layers(model)
    for batch, length in ((1, 5), (1, 1), (3, 1), (2, 4), (4, 2), (1, 7), (0, 3)):
        x = torch.randn(batch, length, layers.H)
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))
        for one in (model, plain):
            one.zero_grad()
            one(x).square().sum().backward()
        torch.testing.assert_close(model.down.grad, plain.down.grad)


class Sequences(layers.Stacked):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).view(x.shape)


class Masked(layers.Stacked):
    """Takes a weight for each token, or one for all: no one graph has both."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x) * scale


@pytest.mark.usefixtures("as_traced")
def test_sizes_that_cannot_be_any() -> None:
    """Where 1 is spread over others, torch's own graphs are made; a program that raises, raises what it does."""
    model = Masked(4)
    plain = copy.deepcopy(model)
    moefuse.compile_layers(model)
    with torch.no_grad():
        for tokens, scales in ((5, 1), (1, 1), (5, 5), (3, 1), (3, 3)):
            x, scale = torch.randn(tokens, layers.H), torch.rand(scales, 1)
            torch.testing.assert_close(model(x, scale), plain(x, scale))
        with pytest.raises(RuntimeError, match="must match"):
            model(torch.randn(3, layers.H), torch.rand(2, 1))


def qwen(depth: int) -> Any:
    config = Qwen3MoeConfig(
        vocab_size=97, hidden_size=16, num_hidden_layers=depth, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=12, max_position_embeddings=64, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def prompts(batch: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Padded on the left."""
    ids = torch.randint(1, 97, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : int(torch.randint(0, length, (1,), generator=generator))] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def test_requests_of_any_size_in_threads() -> None:
    """Batches, lengths and caches change from request to request; two threads serve."""
    model = qwen(2)
    plain = copy.deepcopy(model)
    assert len(moefuse.compile_layers(model)) == 2
    wrong: list[int] = []

    def serve(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for request in range(12):
            batch, length = (int(torch.randint(1, most, (1,), generator=generator)) for most in (6, 20))
            inputs = prompts(batch, length, generator)
            how: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
            cache = {"cache_implementation": "static"} if request % 3 == 2 else {}
            if not torch.equal(model.generate(**inputs, **how, **cache), plain.generate(**inputs, **how)):
                wrong.append(request)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert graphs() <= 6, "three, and each thread may compile what the other one is at"
    assert moefuse.last_report().layers == (2, 2)


@pytest.mark.usefixtures("as_traced")
def test_inside_of_another_compilation() -> None:
    """A whole model that is compiled with moefuse has the layers in its graphs; they are fused once."""
    model = qwen(1)
    plain = copy.deepcopy(model)
    moefuse.compile_layers(model)
    whole = torch.compile(model, backend="moefuse")
    with torch.no_grad():
        for length in (5, 7):
            ids = torch.randint(97, (2, length))
            torch.testing.assert_close(whole(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert moefuse.last_report().layers == (1, 1)


class Scaled(Sequences):
    """Channels of a sequence have a scale: 1 is spread over the tokens."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * scale)


@pytest.mark.usefixtures("as_traced")
@pytest.mark.parametrize("first", [2, 1])
def test_one_is_spread_in_front_of_the_layer(first: int) -> None:
    """Dynamo broke the graph where the sizes that it took for any did not fit, and the first calls ran in eager."""
    model = Scaled(4)
    plain = copy.deepcopy(model)
    moefuse.compile_layers(model)
    with torch.no_grad():
        for batch, length in ((first, 5), (3, 4), (1, 5), (1, 1), (2, 1), (4, 7), (0, 3)):
            x, scale = torch.randn(batch, length, layers.H), torch.randn(batch, 1, layers.H)
            torch.testing.assert_close(model(x, scale), plain(x, scale))
            assert moefuse.last_report().layers == (1, 1)
            assert not moefuse.last_report().graph_breaks


class Counting(layers.Stacked):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.usefixtures("as_traced")
@torch._dynamo.config.patch(recompile_limit=2)
def test_limit_is_told_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    """A number of the module is another one in every call: sizes are not what differs, and what the user has done is no remedy."""
    model = Counting(4)
    moefuse.compile_layers(model)
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(3, layers.H))
    assert "TORCH_LOGS=recompiles says what differs" in caplog.text
    assert "moefuse.compile_layers(model)" not in caplog.text


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layers.Stacked(4), layers.Listed(4), layers.Stacked(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.usefixtures("as_traced")
def test_one_report_of_all_layers() -> None:
    """By the model's names, whatever their kinds; a hook's own frame takes nothing from it."""
    model, seen, x = Kinds(), list[Tensor](), torch.randn(5, layers.H)
    moefuse.compile_layers(model, options={"exclude": r"layers\.1"})
    with torch.no_grad():
        model(x)
        model.layers[2].register_forward_hook(lambda module, args, out: seen.append(out.clone()))
        model(x)
        assert len(seen) == 1
        assert {f.module for f in moefuse.last_report().fused} == {"layers.0", "layers.2"}
        with torch.compiler.set_stance("force_eager"):
            model(x)
        assert not moefuse.last_report().fused
        assert {s.module for s in moefuse.last_report().skipped} == {"layers.0", "layers.2"}
        model(x)
    assert {f.module for f in moefuse.last_report().fused} == {"layers.0", "layers.2"}
    assert not moefuse.last_report().skipped


@pytest.mark.usefixtures("as_traced")
def test_expect_counts_the_layer_that_was_called() -> None:
    model, x = Kinds(), torch.randn(5, layers.H)
    moefuse.compile_layers(model, options={"expect": 1})
    with torch.no_grad():
        model(x)
        model(x[:1])
    torch.compiler.reset()
    moefuse.compile_layers(model, options={"expect": 2})
    with pytest.raises(moefuse.FusionError, match=r"options\['expect'\] is 2, and 1 layers were fused"):
        model(x)


@pytest.mark.usefixtures("as_traced")
def test_hooks_that_come_later() -> None:
    """transformers collects the routers' scores by hooks on modules inside of the layers, which it installs when they are first asked for:
    Dynamo guards no hooks, and the scores were missing."""
    model = qwen(2)
    plain = copy.deepcopy(model)
    moefuse.compile_layers(model)
    ids = torch.randint(97, (2, 5))
    with torch.no_grad():
        model(input_ids=ids)
        for _ in range(2):
            got, wanted = (one(input_ids=ids, output_router_logits=True) for one in (model, plain))
            assert len(got.router_logits) == 2
            torch.testing.assert_close(got.router_logits, wanted.router_logits)
            torch.testing.assert_close(got.aux_loss, wanted.aux_loss)
    assert moefuse.last_report().layers == (2, 2)


@pytest.mark.usefixtures("as_traced")
def test_a_hook_on_one_layer_of_two() -> None:
    """Its experts are refused; the other layer runs the code that both ran before. Of a graph with several modules nobody knew which ran
    last, and the report said that both were fused."""
    model = nn.Sequential(Plain(), Plain()).eval()
    moefuse.compile_layers(model, modules=r"^\d$")
    seen: list[Tensor] = []
    with torch.no_grad():
        model(torch.randn(7, H))
        assert moefuse.last_report().layers == (2, 2)
        model[1].experts[0].register_forward_hook(lambda _m, _i, out: seen.append(out.detach().norm()))
        for _ in range(3):
            model(torch.randn(7, H))
            report = moefuse.last_report()
            assert report.layers == (1, 2)
            assert [entry.module for entry in (*report.fused, *report.skipped)] == ["0", "1.experts.0"]
    assert len(seen) == 3


class Masks(nn.Module):
    """Experts without a number that the graph breaks at: every token is in each expert, with a weight that may be 0."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4, bias=False), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        kept = torch.zeros(len(x), 4).scatter(1, ids, weights)
        return sum(expert(x) * kept[:, e, None] for e, expert in enumerate(self.experts))  # type: ignore[return-value]


@pytest.mark.usefixtures("as_traced")
@pytest.mark.parametrize("strict", [False, True])
def test_inside_of_a_graph_of_another_compiler(strict: bool) -> None:
    """torch makes one graph of the two, which is the outer one's: nothing is fused, and that is said."""
    model = nn.Sequential(Masks(), nn.Tanh(), Masks())
    plain, x = copy.deepcopy(model), torch.randn(5, 8)
    moefuse.compile_layers(model, options={"strict": strict})
    around = torch.compile(model, backend="eager")
    if strict:
        with pytest.raises(moefuse.FusionError, match="compiled with backend='eager', which has it in its own graph"):
            around(x)
        return
    torch.testing.assert_close(around(x), plain(x))
    report = moefuse.last_report()
    assert report.layers == (0, 2)
    assert "compile that with backend='moefuse' too" in report.skipped[0].message
    model(x)
    assert {f.module for f in moefuse.last_report().fused} == {"0", "2"}
    assert not moefuse.last_report().skipped


class Mixed(nn.Module):
    """A layer that does more than choose experts: it has a router, stacked experts, and takes what attention takes."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4, bias=False), Holder()

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        out: Tensor = self.experts(x, ids, weights)
        return out


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 6, 8)), nn.Parameter(torch.randn(4, 8, 6))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(4):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, (x[token] @ self.up[e].T).relu() @ self.down[e].T * weights[token, slot, None])
        return out


def test_what_is_compiled() -> None:
    """The experts alone of a layer that takes what attention takes; what the user names; the outermost of what holds each other."""
    model = nn.ModuleDict({"a": Mixed(), "b": layers.Stacked(4)})
    assert list(layers_of(model)) == ["a.experts", "b"]
    assert list(layers_of(model, r"^a")) == ["a"]
    assert moefuse.compile_layers(layers.Stacked(4)) == [""]


NAMED = {"dbrx", "doge", "nllb_moe", "vitpose_backbone", "zaya"}
"""Experts in one matrix, or a router that is more than one product: users say which modules."""


def test_families_of_transformers() -> None:
    """Structure alone finds the layers of all other families of this release, and of none the whole model."""
    missed, whole = set(), set()
    for name in tiny.FAMILIES:
        try:
            found = layers_of(tiny.build(name))
        except pytest.skip.Exception:
            continue
        missed |= set() if found else {name}
        whole |= {name} if any(len(path.split(".")) < 3 for path in found) else set()
    assert missed == NAMED
    assert not whole


def test_options_and_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as those of torch.compile, and reach Inductor; checked at once; torch takes one of the two."""
    seen: list[dict[str, Any]] = []

    def compile_fx(gm: torch.fx.GraphModule, _inputs: Any, patches: dict[str, Any], _name: object) -> Any:
        seen.append(patches)
        return gm.forward

    monkeypatch.setattr(_torch_private, "compile_fx", compile_fx)
    model, mode = layers.Stacked(4), "max-autotune-no-cudagraphs"
    moefuse.compile_layers(model, mode=mode)
    model(torch.randn(3, layers.H))
    assert moefuse.last_report().layers == (1, 1)
    (patches,) = seen
    assert patches.items() >= torch._inductor.list_mode_options(mode).items()
    with pytest.raises(moefuse.OptionError, match="did you mean 'exclude'"):
        moefuse.compile_layers(model, options={"exlude": "a"})
    with pytest.raises(RuntimeError, match="mode or options"):
        moefuse.compile_layers(model, mode="default", options={"strict": True})


def test_errors() -> None:
    with pytest.raises(TypeError, match="needs a module, got function"):
        moefuse.compile_layers(test_errors)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no module of Linear is built like experts with a router: say which are, modules=r'..'"):
        moefuse.compile_layers(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no module of Stacked has a name like 'mlp'"):
        moefuse.compile_layers(layers.Stacked(4), modules="mlp")
    with pytest.raises(TypeError, match="modules is a regular expression, got int"):
        moefuse.compile_layers(layers.Stacked(4), modules=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"layers \(ModuleList\) has no forward; for what is in it say modules=r'\^layers\\"):
        moefuse.compile_layers(Kinds(), modules="layers")
    with pytest.raises(ValueError, match=r"modules='\(' is no regular expression"):
        moefuse.compile_layers(layers.Stacked(4), modules="(")
