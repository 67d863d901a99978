"""A transformers model from its config alone: random weights, few layers, nothing from the network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from moefuse.cli.command import CommandError, doing
from moefuse.errors import first_line

TOKENS = 16
VOCABULARY = 1024
"""Words of the model that is built: an embedding takes memory and says nothing about experts."""
MEMORY = 0.5
"""Part of the free memory that weights may take."""


def build(path: str, layers: int) -> tuple[torch.nn.Module, dict[str, Any], str]:
    """The model of a ``config.json`` or of the folder with one, shrunk to so many layers, with inputs.

    Returns:
        The model, its keyword arguments, and what was changed.

    Raises:
        CommandError: transformers is missing, the config cannot be read, or the model does not fit.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import transformers
    except ImportError:
        raise CommandError("--hf needs transformers: pip install 'moefuse[transformers]'") from None
    if not Path(path).exists():
        raise CommandError(f"there is no {path}: give a config.json, or the folder of a model that has one (nothing is downloaded)")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise CommandError(f"transformers cannot read {path}: {first_line(error)}") from error
    changed = [change for part in _parts(config) for change in _shrink(part, layers)]
    make = _constructor(transformers, config)
    _check_size(make, path)
    doing(f"building {type(config).__name__.removesuffix('Config')} with random weights ({', '.join(changed) or 'as it is'})")
    try:
        model = make()
    except Exception as error:
        raise CommandError(f"transformers cannot build the model of {path}: {first_line(error)}") from error
    words = min(int(getattr(part, "vocab_size", VOCABULARY) or VOCABULARY) for part in _parts(config))
    inputs: dict[str, Any] = {"input_ids": torch.randint(0, words, (1, TOKENS))}
    return model, inputs | ({"use_cache": False} if hasattr(config, "use_cache") else {}), ", ".join(changed)


def _parts(config: Any) -> list[Any]:
    """The config, and that of the text model inside of one that sees or hears."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return [config] if text is config else [config, text]


def _shrink(config: Any, layers: int) -> list[str]:
    changed = []
    count = getattr(config, "num_hidden_layers", None)
    if isinstance(count, int) and count > layers:
        config.num_hidden_layers = layers
        changed.append(f"{layers} of {count} layers")
        for name, value in vars(config).items():
            if isinstance(value, list) and len(value) == count:
                setattr(config, name, value[:layers])
    # The first layers of some models have no experts, and what is left shall have one.
    dense = getattr(config, "first_k_dense_replace", None)
    if isinstance(dense, int) and dense >= layers:
        config.first_k_dense_replace = layers - 1
        changed.append(f"{layers - 1} of {dense} dense ones")
    words = getattr(config, "vocab_size", None)
    if isinstance(words, int) and words > VOCABULARY:
        config.vocab_size = VOCABULARY
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if getattr(config, name, None) is not None:
                setattr(config, name, None)
        changed.append(f"{VOCABULARY} words")
    return changed


def _constructor(transformers: Any, config: Any) -> Any:
    for kind in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel"):
        auto = getattr(transformers, kind, None)
        if auto is not None and type(config) in auto._model_mapping:
            return lambda: auto.from_config(config)
    raise CommandError(f"this transformers has no model for {type(config).__name__}")


def _check_size(make: Any, path: str) -> None:
    """Build it without memory first."""
    try:
        with torch.device("meta"):
            size = sum(p.numel() * p.element_size() for p in make().parameters())
    except Exception:
        return  # some models compute with their weights while they are built
    free = _free_memory()
    if free is not None and size > MEMORY * free:
        raise CommandError(
            f"the model of {path} takes {size / 2**30:.1f} GiB with these layers, and {free / 2**30:.1f} GiB are free: "
            "give fewer --layers, or a copy of the config with fewer or smaller experts"
        )


def _free_memory() -> int | None:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
