"""Loss curves of the demo's model, eager against moefuse, beside what another order of the same sums does to eager.

    python benchmarks/loss_curves.py                      # full training, 200 steps, a few minutes on two cores
    python benchmarks/loss_curves.py --mode lora          # adapters on the experts, shorter sequences (needs peft)
    python benchmarks/loss_curves.py --mode autocast      # float32 weights under bfloat16 autocast
    python benchmarks/loss_curves.py --show               # draw the pictures anew, and train nothing

Training amplifies rounding: two runs that add the same numbers in another order drift apart, further with each step. So equal curves are
those whose distance is that of such runs. Three of them are run in eager, each with the sequences of every batch in another order,
which changes nothing but the order of sums. Exit status 1 if moefuse is further from eager than ``--factor`` times the furthest of them.

Writes benchmarks/results/loss-curves.json, with one entry for each mode, and a picture of each mode beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "examples")]
import demo  # noqa: E402  (examples/ is no package)
from _loss_picture import drawn  # noqa: E402

import moefuse  # noqa: E402

RESULTS = Path(__file__).parent / "results"
NAME = "loss-curves.json"
ORDERS = ("rolled by 1", "rolled by 3", "reversed")
"""How the sequences of a batch are put in another order, in the runs that measure noise."""


@dataclass(frozen=True)
class Mode:
    """``prepared``: the model that is trained; ``ambient``: what each forward runs in; ``rate``: the largest learning rate.

    ``length``: tokens of a sequence.
    """

    prepared: Callable[[nn.Module], nn.Module] = lambda model: model
    ambient: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    rate: float = 3e-3
    length: int = demo.LENGTH


def adapters(model: nn.Module) -> nn.Module:
    """LoRA of rank 8 on the experts' stacked weights; all else is frozen."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    made: nn.Module = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=[], target_parameters=targets))
    return made


MODES = {
    "full": Mode(),
    # So long that an expert has 32 rows on average: with more, the CPU takes the sum of weights and adapters as the program makes it.
    "lora": Mode(adapters, rate=1e-2, length=32),
    "autocast": Mode(ambient=lambda: torch.autocast("cpu", torch.bfloat16)),
}


def reordered(batch: Tensor, order: str | None) -> Tensor:
    """The sequences of a batch in another order."""
    if order is None:
        return batch
    return batch.flip(0) if order == "reversed" else batch.roll(int(order.rpartition(" ")[2]), 0)


def losses(mode: Mode, corpus: Tensor, steps: int, *, compiled: bool = False, order: str | None = None) -> list[float]:
    """The loss of each step, as the demo trains: AdamW, one cycle, clipped gradients."""
    torch._dynamo.reset()
    model = mode.prepared(demo.build_model()).train()
    if compiled:
        model.compile(backend="moefuse")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=mode.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=mode.rate, total_steps=steps)
    generator, out = torch.Generator().manual_seed(0), []
    for _ in tqdm(range(steps), desc="moefuse" if compiled else f"eager {order or ''}", mininterval=1):
        starts = torch.randint(0, corpus.numel() - mode.length, (demo.BATCH,), generator=generator)
        batch = reordered(torch.stack([corpus[start : start + mode.length] for start in starts.tolist()]), order)
        with mode.ambient():
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        out.append(loss.item())
    return out


def distances(a: list[float], b: list[float]) -> list[float]:
    """The largest difference of two curves up to each step."""
    out: list[float] = []
    for x, y in zip(a, b, strict=True):
        out.append(max(abs(x - y), *out[-1:], 0.0))
    return out


def measured(mode: Mode, steps: int) -> dict[str, Any]:
    """All curves of a mode, and the layers that were fused of those that there are."""
    corpus = demo.read_corpus()
    eager = losses(mode, corpus, steps)
    noise = {order: losses(mode, corpus, steps, order=order) for order in ORDERS}
    mine = losses(mode, corpus, steps, compiled=True)
    report = moefuse.last_report()
    away = distances(mine, eager)
    apart = [max(step) for step in zip(*(distances(one, eager) for one in noise.values()), strict=True)]
    return {
        "steps": steps,
        "torch": torch.__version__,
        "layers": list(report.layers) if report is not None else [0, 0],
        "fused as": sorted({str(fused.spec) for fused in report.fused}) if report is not None else [],
        "last ten": {"eager": sum(eager[-10:]) / 10, "moefuse": sum(mine[-10:]) / 10},
        "furthest": {"moefuse": away[-1], "reordered eager": apart[-1]},
        "eager": rounded(eager),
        "moefuse": rounded(mine),
        "distance": {"moefuse": rounded(away), "reordered eager": rounded(apart)},
    }


def rounded(values: list[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def shown(folder: Path) -> None:
    """Draw what the results say."""
    for mode, result in json.loads((folder / NAME).read_text()).items():
        (folder / f"loss-curves-{mode}.svg").write_text(drawn(mode, result))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default="full")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--show", action="store_true", help="draw the pictures from the results that are there, and train nothing")
    args = parser.parse_args()
    if args.show:
        shown(args.out)
        return 0
    result = measured(MODES[args.mode], args.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / NAME
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | {args.mode: result}) + "\n")
    shown(args.out)
    far, ends = result["furthest"], result["last ten"]
    print(f"layers fused: {result['layers'][0]} of {result['layers'][1]}")
    print(f"mean loss of the last ten steps: eager {ends['eager']:.4f}, moefuse {ends['moefuse']:.4f}")
    print(f"furthest from eager: moefuse {far['moefuse']:.2e}, eager with reordered batches {far['reordered eager']:.2e}")
    return int(result["layers"][0] < result["layers"][1] or far["moefuse"] > args.factor * far["reordered eager"])


if __name__ == "__main__":
    raise SystemExit(main())
