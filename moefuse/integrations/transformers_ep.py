"""moefuse as an expert-parallel implementation of Hugging Face transformers (releases that have a registry of them).

Importing this module registers the name ``"moefuse"``; ``import moefuse`` does it as soon as that part of transformers is there::

    config = DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="moefuse")
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
    model.compile(backend="moefuse")

transformers makes the meshes and loads each rank's experts. The other implementations replace the ``forward`` of an experts module by one
that moves tokens, which no compiler can look behind. With this one the module keeps its ``forward`` and reads full weights, as behind
``moefuse.parallelize``: compiled, tokens travel; otherwise weights are gathered.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moefuse.errors import ParallelError

try:
    from transformers.distributed.expert_parallel import (
        EpDispatchExpertsParallel,
        EPImplementation,
        EPImplementationInterface,
    )
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
except ImportError as error:
    raise ImportError(
        "moefuse.integrations.transformers_ep needs the registry of expert-parallel implementations of newer releases of transformers "
        "(transformers.distributed.expert_parallel); moefuse.parallelize works without it"
    ) from error

NAME = "moefuse"
STYLE = "ep_dispatch_experts"


class MoefuseEP(EPImplementation):  # type: ignore[misc]
    """A name in the registry. It moves no tokens itself: the style spreads the module's experts instead."""

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        raise ParallelError(
            f"{type(experts).__name__}: ep_implementation={NAME!r} is for the style {STYLE!r} as moefuse registers it, and another library "
            f"has registered that style since: import moefuse behind it, and moefuse.integrations.transformers_ep.install()"
        )


class MoefuseStyle(EpDispatchExpertsParallel):  # type: ignore[misc]
    """transformers' style for experts that tokens are sent to, but for models with ``ep_implementation="moefuse"``."""

    def install_forward(self, module: nn.Module, ep_mesh: DeviceMesh, *, tp_mesh: DeviceMesh, ep_implementation: str = "auto") -> Any:
        """Let a module keep its forward, and have it spread once it is loaded."""
        if ep_implementation != NAME:
            return super().install_forward(module, ep_mesh, tp_mesh=tp_mesh, ep_implementation=ep_implementation)
        from moefuse.parallel.taken import take_when_loaded

        same = ep_mesh.mesh.flatten().tolist() == tp_mesh.mesh.flatten().tolist()
        if tp_mesh.size() > 1 and not same:
            raise ParallelError(
                f"{type(module).__name__}: ep_implementation={NAME!r} has ranks with tokens of their own or with equal ones, and "
                f"ep_size={ep_mesh.size()} with tp_size={tp_mesh.size()} is both: use tp_size=1 or tp_size=ep_size"
            )
        _all_experts(module)
        # FSDP divides gradients by the ranks with batches of their own.
        take_when_loaded(module, ep_mesh, "replicated" if same else "distinct", "sum")
        return module


def _all_experts(module: Any) -> None:
    """The number of experts, as it was before their Parameters were sharded: the module sees all of them."""
    first = next((p for p in module._parameters.values() if hasattr(p, "device_mesh")), None)
    if first is None:
        raise ParallelError(f"{type(module).__name__}: ep_plan sharded none of its Parameters: give each the rule 'grouped_gemm'")
    module.num_experts = first.shape[0]
    module._is_expert_parallel = False


def install() -> None:
    """Register the name and the style; does nothing when done already."""
    EPImplementationInterface.register(NAME, MoefuseEP)
    if not isinstance(ALL_PARALLEL_STYLES[STYLE], MoefuseStyle):
        ALL_PARALLEL_STYLES.register(STYLE, MoefuseStyle())


install()
