"""Copies of the hottest experts on all ranks beside one process, and what becomes of them where experts are written."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import moefuse
from moefuse.parallel.shard import held_of
from tests.dist import layers, posing, scenes
from tests.dist.balanced import E, _model as made
from tests.dist.scenes import compiled

COPIES = 2


def load_of(plan: Any, hot: tuple[int, ...], times: int = 100_000) -> dict[str, list[int]]:
    """Counts of which these experts have more than a rank has on average, whatever else it had."""
    return {
        layer.name: [times * (10 + e) if e in hot else 10 * times // 20 + e for e in range(layer.placement.experts)]
        for layer in plan.layers
    }


def tokens(rank: int, seed: int = 0, count: int = 9) -> Tensor:
    return torch.randn(count, layers.H, generator=torch.Generator().manual_seed(seed * 5 + rank))


def hot_of(model: nn.Module) -> list[Any]:
    """What each spread layer has of copies."""
    return list({id(h.where): h.where.hottest for m in model.modules() if (h := held_of(m)) is not None}.values())


def as_on_one_process(rank: int, kind: type[nn.Module], how: dict[str, Any], experts: int = 4, hosts: str = "") -> dict[str, Any]:
    """What is other than on one process with copies, behind all that writes to experts, and without them; what was compiled for it."""
    if hosts:
        posing.on(rank, hosts)
    torch._dynamo.reset()
    torch.manual_seed(0)
    single = layers.One(kind, experts).eval()
    model = copy.deepcopy(single)
    plan = moefuse.parallelize(model, scenes.mesh(), **how)
    counters = torch._dynamo.utils.counters["stats"]
    run, off, x = compiled(model), {}, tokens(rank)

    def check(what: str, model: Any = run) -> None:
        off[what] = float((model(x) - single(x)).abs().max())

    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check("before")
        plan = plan.balance(load_of(plan, (0, 3)), copies=COPIES)
        copied = [layer.copied for layer in plan.layers]
        check("copied")
        graphs = counters["unique_graphs"]
        for seed, hot in enumerate(((1, 2), (0, 2), (2, 3))):
            plan = plan.balance(load_of(plan, hot), copies=COPIES)
            x = tokens(rank, seed)
            check(f"copied {hot}")
        again = counters["unique_graphs"] - graphs
        read = [_is_read(run, one, x) for one in hot_of(model)]
        plan.refresh()
        check("refreshed")
        check("eager", model)
        check("a twin", copy.deepcopy(model))
        old = len([w for w in said if "have been written since" in str(w.message)])
        other = {
            key: 0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(7)) for key, value in single.state_dict().items()
        }
        for each in (model, single):
            each.load_state_dict(other)
        check("loaded")
        plan.refresh()
        check("loaded and refreshed")
        _scale(model, 0.5)
        _scale(single, 0.5)
        check("written")
        plan.refresh()
        check("written and refreshed")
        for p in plan.parameters:
            p.to_local().data.mul_(2)  # past torch's versions
        for name, p in single.named_parameters():
            p.mul_(2 if _is_experts(name) else 1)
        plan.refresh()
        check("written past versions and refreshed")
        told = [str(w.message) for w in said if "have been written since" in str(w.message)]
        state, wanted = moefuse.full_state_dict(model), single.state_dict()
        off["state"] = float(max((state[key] - wanted[key]).abs().max() for key in wanted)) if rank == 0 else 0.0
    grads = tokens(rank, 3)
    off["training"] = float((run(grads.requires_grad_()) - single(grads)).detach().abs().max())
    with torch.no_grad():
        plan = plan.balance({name: [1000] * experts for name in load_of(plan, ())})
        check("gone")
        more = sum(p.to_local().untyped_storage().nbytes() - p.to_local().nbytes for p in plan.parameters)
        plan.balance(load_of(plan, (1, 3)), copies=COPIES)
        moefuse.unparallelize(model)
        check("whole again", model)
    return {
        "off": off, "copied": copied, "again": again, "read": read, "more": more, "old": old, "told": told,
        "said": str(plan), "left": [layer.copied for layer in plan.layers],
    }  # fmt: skip


def _is_experts(name: str) -> bool:
    return not {"router", "norm"} & set(name.split("."))


def _scale(model: nn.Module, by: float) -> None:
    for name, p in model.named_parameters():
        if _is_experts(name):
            p.mul_(by)


def _is_read(run: Any, hottest: Any, x: Tensor) -> bool:
    """Whether what a rank computes changes with its copies, on any rank; they are wrong afterwards."""
    before = run(x)
    for wide in hottest.room.wide:
        wide.rows[len(wide.part) :] = 3.0
    differs = torch.tensor([float((run(x) - before).abs().max() > 0)])
    dist.all_reduce(differs)
    return bool(differs)


def stepped(rank: int, how: dict[str, Any]) -> list[float]:
    """How far a model is off behind an optimizer's step with experts that have copies, and with copies made anew."""
    model, single, plan = made(layers.Transposed)
    run, x, off = compiled(model), tokens(rank), []
    with torch.inference_mode():  # what is made of memory here is for training, too
        plan = plan.balance(load_of(plan, (0, 3)), copies=COPIES)
        run(x)
    for each, groups in ((model, plan.param_groups(model)), (single, [{"params": list(single.parameters())}])):
        optimizer = torch.optim.AdamW(groups, lr=0.1, **how)
        for p in each.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
    del optimizer
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        off.append(float((run(x) - single(x)).abs().max()))
        plan.refresh()
        off.append(float((run(x) - single(x)).abs().max()))
    return off


def in_turns(rank: int) -> dict[str, Any]:
    """Copies of either layer, of both, of none: what is off, how often that was compiled for, and what layers have then."""
    model, single, plan = made(layers.Transposed)
    run, x, off = compiled(model), tokens(rank), []
    even = [1000] * E
    first, second = (layer.name for layer in plan.layers)
    hot = load_of(plan, (0, 3))
    with torch.no_grad():
        run(x)
        plan = plan.balance(hot, copies=COPIES)
        run(x)
        torch._dynamo.utils.counters.clear()
        loads = [{first: hot[first], second: even}, {first: even, second: hot[second]}, {first: even, second: even}, hot]
        copied = []
        for load in loads:
            plan = plan.balance(load, copies=COPIES)
            copied.append([bool(layer.copied) for layer in plan.layers])
            off.append(float((run(x) - single(x)).abs().max()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for each in (model, single):
                dict(each.named_parameters())["first.down"].mul_(2)
            off.append(float((run(x) - single(x)).abs().max()))
        plan = plan.balance(loads[0], copies=COPIES, layers=0)
        copied.append([bool(layer.copied) for layer in plan.layers])
        off.append(float((run(x) - single(x)).abs().max()))
    return {"off": off, "copied": copied, "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


def written_by_one(rank: int) -> str:
    """What is told where one rank alone writes its experts."""
    model, _, plan = made(layers.Transposed)
    run = compiled(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan.balance(load_of(plan, (0, 3)), copies=COPIES)
        run(tokens(rank))
        if rank:
            dict(model.named_parameters())["first.down"].to_local().mul_(2)
        try:
            run(tokens(rank))
        except moefuse.PeerError as error:
            return str(error)
    return "nothing"


def refusals(rank: int) -> list[str]:
    said = []

    def refused(plan: Any, **more: Any) -> None:
        try:
            plan.balance(load_of(plan, (0, 3)), **more)
            said.append("nothing")
        except moefuse.ParallelError as error:
            said.append(str(error))

    _, _, plan = made(layers.Stacked)
    refused(plan, copies=-1)
    refused(plan, copies=True)
    refused(plan, copies=1.5 if rank else 1)
    refused(plan, layers=-1)
    refused(plan, copies=1 + rank)
    refused(plan, layers=1 + rank)
    _, _, plan = made(layers.Stacked, tokens="replicated")
    refused(plan, copies=1)
    _, _, plan = made(layers.Stacked, transport="gather")
    refused(plan, copies=1)
    model, _, plan = made(layers.Stacked)
    hot_of(model)[0].captured = True  # as where a CUDA graph was captured (tests/gpu)
    refused(plan, copies=1)
    return said


def little(rank: int) -> list[Any]:
    """Where moving alone is as good: copies of nothing; and where few tokens would have more weights read."""
    _, _, plan = made(layers.Stacked)
    even = plan.balance({layer.name: [1000] * E for layer in plan.layers}, copies=COPIES)
    few = plan.balance({layer.name: [[3, 0, 1, 0, 0, 0]] for layer in plan.layers}, copies=COPIES)
    return [layer.copied for layer in (*even.layers, *few.layers)]


def on_gpus(rank: int, transport: str, count: int, width: int, mode: str | None) -> dict[str, Any]:
    """The same on GPUs in ``count`` tokens of ``width`` features: copies that are read, old, and made again; then in a CUDA graph."""
    before = layers.H, layers.I
    layers.H = layers.I = width
    torch._dynamo.reset()
    torch.manual_seed(0)
    single = layers.Model(layers.Stacked, E).cuda().eval()
    model = copy.deepcopy(single)
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("ep",))["ep"]
    plan = moefuse.parallelize(model, mesh, transport=transport, max_tokens=count)
    run, off = torch.compile(model, backend="moefuse", dynamic=False, mode=mode), {}
    x = torch.randn(count - rank * (count // 3), width, device="cuda", generator=torch.Generator("cuda").manual_seed(rank))

    def check(what: str, call: Any = run) -> None:
        wanted = single(x)
        torch.compiler.cudagraph_mark_step_begin()
        off[what] = ((call(x) - wanted).norm(dim=-1) / wanted.norm(dim=-1).mean()).quantile(0.9).item()

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check("before")
        for hot in ((0, 3), (1, 2)):
            plan = plan.balance(load_of(plan, hot), copies=COPIES)
            for turn in range(4):
                check(f"{hot} {turn}")
        read = [_is_read(run, one, x) for one in hot_of(model)]
        plan.refresh()
        check("refreshed")
        for each in (model, single):
            _scale(each, 0.5)
        check("written")
        plan.refresh()
        check("written and refreshed")
        graph = torch.cuda.CUDAGraph()
        if mode is None:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                out = run(x)
            for each in (model, single):
                _scale(each, 2)
            graph.replay()
            check("replayed", lambda _: out)
    refused = ""
    try:
        plan.balance(load_of(plan, (0, 3)), copies=COPIES)
    except moefuse.ParallelError as error:
        refused = str(error)
    layers.H, layers.I = before
    return {"off": off, "read": read, "refused": refused}
