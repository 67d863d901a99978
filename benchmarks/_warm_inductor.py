"""What the fork server of ``compile_families.py`` imports once: torch, transformers and a first use of Inductor."""

import os
import tempfile

import torch
import transformers  # noqa: F401
import zoo_coverage  # noqa: F401

from tests.zoo import tiny  # noqa: F401

with tempfile.TemporaryDirectory() as folder:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch.compile(lambda x: x.sin() + 1, backend="inductor")(torch.ones(8))
