"""What takes long to import, and starts no thread: see ``workers``."""

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
import tests.dist.workers
from tests.cheap import cheaper_compiles

__all__ = ["moefuse", "tests", "torch"]

cheaper_compiles()
# No collection of a worker looks at what was imported here; that took two fifths of its time.
gc.collect()
gc.freeze()
