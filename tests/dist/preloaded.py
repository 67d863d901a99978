"""What takes long to import, or to compile for the first time, and starts no thread: see ``workers``."""

import gc

import torch._dynamo
import torch._dynamo.backends.common
import torch._dynamo.repro.after_dynamo
import torch._export.db.logging
import torch._functorch.aot_autograd
import torch._higher_order_ops.passes
import torch._inductor.compile_fx
import torch.distributed
import torch.distributed.tensor

import moefuse.backend
import moefuse.capture.dynamo
import moefuse.parallel.api
import moefuse.passes.driver
import moefuse.pipeline.rewrite
import tests.dist.scenes
import tests.dist.workers
from tests.cheap import cheaper_compiles
from tests.cpu.capture_case import Seen, capturing

__all__ = ["moefuse", "tests", "torch"]


def warm() -> None:
    """What torch imports and looks up for a first compilation is there in every worker: that took as long as a small one."""
    torch.set_num_threads(1)
    run = torch.compile(tests.dist.layers.Listed(2), backend=capturing(Seen()), dynamic=True)
    with torch.no_grad():
        run(torch.randn(3, tests.dist.layers.H))
    torch._dynamo.reset()


cheaper_compiles()
warm()
# No collection of a worker looks at what was imported here; that took two fifths of its time.
gc.collect()
gc.freeze()
