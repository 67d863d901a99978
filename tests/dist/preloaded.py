"""What takes long to import, and starts no thread: see ``workers``."""

import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed

import moefuse.backend
import moefuse.pipeline.rewrite
import tests.dist.workers

__all__ = ["moefuse", "tests", "torch"]
