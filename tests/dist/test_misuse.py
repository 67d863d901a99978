"""Every misuse is one sentence that names the module and the remedy, and leaves the model as it was. One process, and a fake group."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import moefuse
from moefuse import ParallelError
from moefuse.parallel.placement import Placement
from moefuse.runtime import groups
from tests.dist import idioms, layers


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Rank 1 of 4."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    dist.destroy_process_group()
    groups._groups.clear()


def refused(model: nn.Module, mesh: object, text: str, **how: object) -> None:
    kinds = {name: type(module) for name, module in model.named_modules()}
    keys = {name: id(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises(ParallelError, match=text):
        moefuse.parallelize(model, mesh, **how)  # type: ignore[arg-type]
    assert kinds == {name: type(module) for name, module in model.named_modules()}
    assert keys == {name: id(parameter) for name, parameter in model.named_parameters()}


def test_no_process_group() -> None:
    refused(layers.Model(layers.Stacked, 8), None, "there is no process group: call torch.distributed.device_mesh.init_device_mesh first")


def test_no_mesh(mesh: DeviceMesh) -> None:
    refused(layers.Model(layers.Stacked, 8), "ep", r"mesh is a str; use a DeviceMesh, e\.g\. init_device_mesh")


def test_several_dimensions(mesh: DeviceMesh) -> None:
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    refused(
        layers.Model(layers.Stacked, 8),
        two,
        r"has 2 dimensions \('dp', 'ep'\); give the one .* mesh\['ep'\], or say .* experts=\('dp', 'ep'\)",
    )


def test_roles_and_dimensions(mesh: DeviceMesh) -> None:
    model = layers.Model(layers.Stacked, 8)
    refused(model, mesh, r"experts=\('tp', 'ep'\) is not legal; use 'ep', 'tp', or \('ep', 'tp'\)", experts=("tp", "ep"))
    refused(model, mesh, r"is for a mesh of 2 dimensions, e\.g\. mesh\['ep', 'tp'\]; this one has 1", experts=("ep", "tp"))


def test_shared_memory(mesh: DeviceMesh) -> None:
    model = layers.Model(layers.Stacked, 8)
    refused(model, mesh, "transport='symm' has buffers of a fixed size: give max_tokens", transport="symm")
    refused(model, mesh, "is for CUDA devices, and the mesh is of 'cpu': use 'allgather'", transport="symm", max_tokens=8)
    refused(model, mesh, "transport='nvlink' is not legal; use 'auto' or 'allgather' or", transport="nvlink")


def test_hidden_units_that_do_not_divide(mesh: DeviceMesh) -> None:
    """Twelve by four do, thirteen do not."""
    model = layers.Model(layers.Listed, 4)
    for layer in (model.first, model.second):
        for i, expert in enumerate(layer.experts):  # type: ignore[arg-type,union-attr]
            layer.experts[i] = nn.Sequential(nn.Linear(layers.H, 13), nn.GELU(), nn.Linear(13, layers.H))  # type: ignore[index,union-attr]
            del expert
    refused(model, mesh, "first: 13 hidden units do not divide by 4 ranks; use experts='ep', or another number of ranks", experts="tp")


def test_slices_of_what_is_not_recognised(mesh: DeviceMesh) -> None:
    refused(
        layers.Model(layers.Mixed, 4),
        mesh,
        "first: which of its weights' dimensions are hidden units is not known, for .*rows.*; use experts='ep'",
        experts="tp",
    )


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (layers.OfAllUnits, "`layer_norm` is not of each hidden unit"),
        (layers.OfTheSum, "`tanh` is of the sum over all hidden units"),
    ],
)
def test_slices_of_what_is_no_sum_over_units(mesh: DeviceMesh, kind: type[layers.Routed], what: str) -> None:
    """What some of the hidden units give would not add up to it."""
    refused(layers.Model(kind, 4), mesh, f"first: {what}; use experts='ep'$", experts="tp")


def test_no_experts(mesh: DeviceMesh) -> None:
    refused(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), mesh, "found no experts in Sequential: no Parameters")


def test_fewer_experts_than_ranks(mesh: DeviceMesh) -> None:
    refused(
        layers.Model(layers.Stacked, 3), mesh, "first has 3 experts, and the mesh 4 ranks: give a mesh of at most 3 ranks, or of a multiple"
    )


def test_an_optimizer_that_has_them(mesh: DeviceMesh) -> None:
    model = layers.Model(layers.Stacked, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused(model, mesh, r"a Parameter of first is in an optimizer \(SGD\) already: make the optimizer after moefuse.parallelize")
    refused(model.first, mesh, r"a Parameter of the model is in an optimizer \(SGD\) already")  # type: ignore[arg-type]
    del optimizer


def test_tied_experts(mesh: DeviceMesh) -> None:
    model = layers.Model(layers.Stacked, 8)
    model.second.down = model.first.down  # type: ignore[union-attr]
    refused(model, mesh, r"first.down and second.down are one Parameter: tied experts cannot be sharded, untie them")


@pytest.mark.parametrize("kind", [layers.Stacked, layers.Listed])
def test_torch_func(mesh: DeviceMesh, kind: type[nn.Module]) -> None:
    """Torch's own error is of autograd.Function, and names nobody."""
    model = layers.Model(kind, 8)
    moefuse.parallelize(model, mesh)
    with pytest.raises(ParallelError, match=r"torch.func \(grad\) runs (Stacked|ModuleList), whose experts are spread"):
        torch.func.grad(lambda x: model(x).sum())(torch.randn(3, layers.H))


def test_an_attribute_of_an_expert_is_set(mesh: DeviceMesh) -> None:
    """To a Parameter or a tensor, as ``functional_call`` does with the keys of the model on one process."""
    model: Any = layers.Model(layers.Listed, 8)
    full = dict(model.named_parameters())
    moefuse.parallelize(model, mesh)
    text = "weight of Linear in an expert of first was set, and is a row of what the list of experts has on one rank: set it before"
    for value in (nn.Parameter(torch.zeros(2)), torch.zeros(2)):
        with pytest.raises(ParallelError, match=text):
            model.first.experts[1][0].weight = value
    with pytest.raises(ParallelError, match=text):
        torch.func.functional_call(model, full, torch.randn(3, layers.H))


@pytest.mark.parametrize("kind", [layers.Stacked, layers.Listed])
def test_one_layer_in_two_blocks(mesh: DeviceMesh, kind: type[nn.Module]) -> None:
    """It is one layer, also to the second block."""
    model: Any = layers.Blocks(kind, 8)
    assert [layer.name for layer in moefuse.parallelize(model, mesh).layers] == ["first.layer"]


def test_layers_that_share_a_module_with_experts(mesh: DeviceMesh) -> None:
    """Each has a router of its own."""
    model: Any = layers.Model(layers.Inner, 8)
    model.second.held = model.first.held
    refused(model, mesh, "first and second have one module with their experts: it cannot be sharded, give each layer its own")


def test_modules_that_experts_share(mesh: DeviceMesh) -> None:
    """A layer's whole list, a part of an expert, an expert under another name; what has no Parameters may be shared."""
    model: Any = layers.Model(layers.Listed, 8)
    model.second.experts = model.first.experts
    refused(model, mesh, "first and second have one list of experts: it cannot be sharded, give each layer its own")
    model = layers.Model(layers.Listed, 8)
    for expert in model.second.experts:
        expert[2] = model.second.experts[0][2]
    refused(model, mesh, r"second.experts.0.2 and second.experts.1.2 are one module: experts that share it cannot be sharded, copy it")
    model = layers.Model(layers.Listed, 8)
    model.first.shared = model.first.experts[3]
    refused(model, mesh, r"first.shared and first.experts.3 are one module|first.experts.3 and first.shared are one module")
    model = layers.Model(layers.Listed, 8)
    for expert in model.second.experts:
        expert[1] = model.second.experts[0][1]
    moefuse.parallelize(model, mesh)


def test_experts_that_are_not_alike(mesh: DeviceMesh) -> None:
    """One of a list is frozen, or one of its biases: all become one Parameter."""
    model: Any = layers.Model(layers.Listed, 8)
    model.second.experts[3][0].bias.requires_grad_(False)
    refused(model, mesh, r"second.experts.3.0.bias is frozen and others of the list are not: they become one Parameter. Freeze all or none")
    refused(model, mesh, "second.experts.3", modules="second")
    moefuse.parallelize(model, mesh, modules="first")


@pytest.mark.parametrize("kind", [layers.Stacked, layers.Listed])
def test_what_hangs_on_a_parameter(mesh: DeviceMesh, kind: type[nn.Module]) -> None:
    """Hooks and gradients would stay with Parameters that nobody trains."""
    for hang in ("register_hook", "register_post_accumulate_grad_hook"):
        model = layers.Model(kind, 8)
        parameter = next(p for name, p in model.first.named_parameters() if "router" not in name)  # type: ignore[union-attr]
        getattr(parameter, hang)(lambda grad: None)
        refused(model, mesh, "a Parameter of first.* has a hook on its gradient, .* register it afterwards, on those of plan.parameters")
    model = layers.Model(kind, 8)
    model(torch.randn(3, layers.H)).sum().backward()
    refused(model, mesh, r"a Parameter of first.* has a gradient, .* call model.zero_grad\(\) first")


@pytest.mark.parametrize("kind", [layers.Stacked, layers.Listed])
def test_what_hangs_on_what_was_read(mesh: DeviceMesh, kind: type[nn.Module]) -> None:
    """An attribute that was a Parameter is read anew each time: what is hung on one read is told; within a call it is that of the call."""
    model: Any = layers.Model(kind, 8)
    moefuse.parallelize(model, mesh)

    def weight() -> Any:
        return model.first.down if kind is layers.Stacked else model.first.experts[1][0].weight

    def grad(weight: Any) -> None:
        weight.grad = torch.zeros_like(weight)

    lost = r"(Stacked.down|\S+weight) is put together .* would be lost: take the Parameter itself, .*, from model.named_parameters"
    for hang in (grad, lambda w: w.requires_grad_(False), lambda w: w.register_post_accumulate_grad_hook(lambda p: None)):
        with pytest.raises(ParallelError, match=lost):
            hang(weight())
    with pytest.warns(UserWarning, match="a hook on .* is of this read alone") as told:
        weight().register_hook(lambda grad: grad)
    assert told[0].filename == __file__
    seen = []
    forward = model.first.route

    def hooked(x: torch.Tensor) -> Any:
        weight().register_hook(seen.append)
        return forward(x)

    model.first.route = hooked
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(6, layers.H)).sum().backward()
    assert len(seen) == (kind is layers.Stacked)  # an expert of a list reads a row anew


def test_parts_of_a_list(mesh: DeviceMesh) -> None:
    """What an expert has is with its list: who asks the expert is told."""
    model: Any = layers.Model(layers.Listed, 8)
    moefuse.parallelize(model, mesh)
    text = "state_dict of a part of an expert of first, whose weights .*: call it on the list or on a module around it"
    for part in (model.first.experts[2], model.first.experts[2][0]):
        with pytest.raises(ParallelError, match=text):
            part.state_dict()
        with pytest.raises(ParallelError, match=f"load_{text}"):
            part.load_state_dict({})
        with pytest.warns(UserWarning, match=r"requires_grad_\(False\) of an expert of first changes nothing: .* Call it on the list"):
            part.requires_grad_(False)
    assert {key.split(".")[0] for key in model.first.experts.state_dict()} == {"2", "3"}
    assert {key for key in model.state_dict() if key.startswith("first.experts.2.")}
    model.requires_grad_(False)
    model.first.experts.requires_grad_(True)
    assert {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad} == {"first"}


def test_whose_tokens(mesh: DeviceMesh) -> None:
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    model = layers.Model(layers.Stacked, 4)
    both = {"experts": ("ep", "tp")}
    refused(model, two, r"tokens=\('replicated', 'distinct'\) is not legal: what differs among", tokens=("replicated", "distinct"), **both)
    refused(model, mesh, r"is for 2 dimensions, and experts are spread over 1: \('ep',\)", tokens=("distinct", "replicated"))
    refused(model, two, "tokens='own' is not legal; use 'distinct' or", tokens=("distinct", "own"), **both)
    text = "2.bias of first.experts is no sum over hidden units, and every rank with slices of an expert has it whole: say tokens="
    refused(layers.Model(layers.Listed, 4), two, text, **both)
    plan = moefuse.parallelize(model, two, experts=("ep", "tp"), max_tokens=5)
    assert [terms.most for terms in plan.layers[0].terms] == [10, 5]  # tokens of both ranks with slices go on together


@pytest.mark.parametrize("kind", [layers.Stacked, layers.Listed])
@pytest.mark.parametrize("experts", ["ep", "tp"])
def test_twice(mesh: DeviceMesh, kind: type[nn.Module], experts: str) -> None:
    """The whole, or a part of it first."""
    whole, part = layers.Model(kind, 4), layers.Model(kind, 4)
    moefuse.parallelize(whole, mesh, experts=experts)  # type: ignore[arg-type]
    moefuse.parallelize(part.second, mesh, experts=experts)  # type: ignore[arg-type]
    refused(whole, mesh, "the experts of first are spread over ranks already: call moefuse.parallelize once, for the whole model")
    refused(part, mesh, "the experts of second are spread over ranks already: call moefuse.parallelize once")
    moefuse.parallelize(part, mesh, modules="first", experts=experts)  # type: ignore[arg-type]


def test_sharded_by_another_library(mesh: DeviceMesh) -> None:
    model = layers.Model(layers.Stacked, 8)
    model.first.down = nn.Parameter(DTensor.from_local(torch.randn(2, layers.H, layers.I), mesh, [Shard(0)]))  # type: ignore[union-attr]
    refused(model, mesh, r"first has a Parameter that is a DTensor already: call moefuse.parallelize before other libraries shard")


def test_biases_beside_their_weights(mesh: DeviceMesh) -> None:
    """The router is in the module around: no bias is taken for one."""
    model = idioms.Block("biased", "softmax", "nothing", 8, 2)
    plan = moefuse.parallelize(model, mesh)
    assert [layer.name for layer in plan.layers] == ["mlp"]
    names = {name for name, p in model.named_parameters() if isinstance(p, DTensor)}
    assert names == {f"mlp.experts.{name}" for name in ("gate_up", "down", "gate_up_bias", "down_bias")}


def test_a_dimension_of_replicas(mesh: DeviceMesh) -> None:
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = layers.Model(layers.Stacked, 8)
    refused(model, two["ep"], "experts='dp' is not legal; use 'ep', 'tp', or .* or one of these behind 'dp'", experts="dp")
    refused(model, two, r"experts=\('ep', 'dp'\) is not legal", experts=("ep", "dp"))
    refused(model, two["ep"], r"is for a mesh of 2 dimensions, e\.g\. mesh\['dp', 'ep'\]; this one has 1", experts=("dp", "ep"))
    plan = moefuse.parallelize(model, two, experts=("dp", "ep"))
    assert str(plan).splitlines()[0] == "first: dp=2 x ep=2 linear, 4 of 8 experts here, allgather"


def test_replicas_that_fsdp_shards_as_well(mesh: DeviceMesh) -> None:
    """One of both: averaged by moefuse, or sharded by FSDP over the same ranks. Torch says so."""
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = layers.Model(layers.Stacked, 8)
    moefuse.parallelize(model, two, experts=("dp", "ep"))
    with pytest.raises(RuntimeError, match="overlapping meshes"):
        fully_shard(model.first, mesh=two["dp"])


def test_no_model(mesh: DeviceMesh) -> None:
    with pytest.raises(ParallelError, match=r"model is a Parameter; give an nn.Module whose layers have experts"):
        moefuse.parallelize(nn.Parameter(torch.zeros(2)), mesh)  # type: ignore[arg-type]


def test_a_mesh_without_this_rank(mesh: DeviceMesh) -> None:
    others = DeviceMesh("cpu", [0, 2], mesh_dim_names=("ep",))
    refused(layers.Model(layers.Stacked, 8), others, r"rank 1 is not in the mesh of ranks \[0, 2\]: only those call moefuse.parallelize")


def test_another_device(mesh: DeviceMesh) -> None:
    """A model on GPUs and a mesh of CPUs. (The other way round its experts move.)"""
    model = layers.Model(layers.Stacked, 8)
    with mock.patch.object(mesh, "_device_type", "cuda"):
        moefuse.parallelize(layers.Model(layers.Stacked, 8).to("meta"), mesh)
    with mock.patch("torch.nn.Parameter.device", torch.device("cuda")):
        refused(model, mesh, "first is on 'cuda', and the mesh is of 'cpu' devices: give a mesh of 'cuda', or move the model first")


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"tokens": "own"}, "tokens='own' is not legal; use 'distinct' or 'replicated' or 'sequence'"),
        ({"grads": "max"}, "grads='max' is not legal; use 'mean' or 'sum'"),
        ({"max_tokens": 0}, "max_tokens=0 is not legal; use a positive number, 'equal' or None"),
        ({"max_tokens": True}, "max_tokens=True is not legal; use a positive number, 'equal' or None"),
        ({"placement": "best"}, "first: placement='best' is not legal; use 'linear', 'round_robin', or a rank for each expert"),
        ({"placement": 3}, "first: placement=3 is not legal; use 'linear', 'round_robin', or a rank for each expert"),
        ({"placement": [0, 1]}, "first: placement is for 2 experts on 4 ranks; there are 8 on 4"),
        ({"placement": [0, 1, 2, 3, 4, 0, 1, 2]}, "first: placement names rank 4, and the mesh has ranks 0 to 3"),
        ({"modules": "first("}, r"modules='first\(' is no regular expression \(.*\); use one that the names of layers match"),
        ({"modules": "third"}, "found no experts in modules that match 'third' in Model"),
    ],
)
def test_arguments(mesh: DeviceMesh, how: dict[str, object], text: str) -> None:
    refused(layers.Model(layers.Stacked, 8), mesh, text, **how)


def test_a_placement_that_is_no_cover() -> None:
    """It cannot be made."""
    for ranks, wrong in (((0, 1), (1, 2)), r"\[1\]"), (((0, 1), (3,)), r"\[2\]"):
        with pytest.raises(ParallelError, match=f"a placement holds every expert once: .* {wrong} are missing or doubled"):
            Placement("mine", ranks)  # type: ignore[arg-type]


def test_a_graph_of_another_process() -> None:
    """A graph from a cache may name a mesh that nobody has made here."""
    text = r"runs on the mesh 'nowhere', which this process does not have: call moefuse\.parallelize first"
    with pytest.raises(ParallelError, match=text):
        groups.group("nowhere")


@pytest.mark.usefixtures("as_traced")
def test_the_plan_and_the_report(mesh: DeviceMesh) -> None:
    """What was decided can be read, and ``explain`` says it of each layer without other ranks."""
    model = layers.Model(layers.Stacked, 7)
    plan = moefuse.parallelize(model, mesh, max_tokens=32)
    assert str(plan).splitlines() == [
        "first: ep=4 linear, 2 of 7 experts here, allgather, tokens <= 32",
        "second: ep=4 linear, 2 of 7 experts here, allgather, tokens <= 32",
    ]
    with torch.no_grad():
        report = moefuse.explain(model, torch.randn(6, layers.H))
    assert [fused.parallel for fused in report.fused] == ["ep=4 linear, 2 of 7 experts here, allgather, tokens <= 32"] * 2
    assert "ep=4 linear, 2 of 7 experts here" in str(report)


def test_the_model_looks_as_it_did(mesh: DeviceMesh) -> None:
    """Shapes, lengths, names of classes and keys are those of the full model."""
    for kind in (layers.Stacked, layers.Listed):
        model, full = layers.Model(kind, 8), layers.Model(kind, 8)
        moefuse.parallelize(model, mesh)
        assert isinstance(model.first, kind)
        assert type(model.first).__name__ == kind.__name__
        assert repr(model) == repr(full)
    stacked = layers.Model(layers.Stacked, 8)
    moefuse.parallelize(stacked, mesh)
    assert stacked.first.gate_up.shape == (8, 2 * layers.I, layers.H)  # type: ignore[union-attr]
    assert stacked.state_dict().keys() == layers.Model(layers.Stacked, 8).state_dict().keys()
    assert sum(p.to_local().numel() for p in stacked.first.parameters() if hasattr(p, "to_local")) * 4 == sum(
        p.numel() for n, p in layers.Stacked(8).named_parameters() if n != "router.weight"
    )
