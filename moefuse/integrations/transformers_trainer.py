"""transformers' Trainer saves models whose experts are spread: all ranks gather, and the one that the Trainer saves on writes.

``Trainer.save_model`` is called on all ranks and saves on one, which alone has no whole weights. What an optimizer knows of experts is each
rank's own, and the Trainer writes the first rank's for all: such checkpoints have none, so that who resumes begins with a fresh optimizer
instead of another rank's.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

from transformers.trainer import Trainer

from moefuse.parallel.shard import holders_of
from moefuse.parallel.state import full_state_dict


def _is_ours(trainer: Any) -> bool:
    """Whether ``moefuse.parallelize`` has spread experts; a model that transformers itself has put on ranks is saved by all of them."""
    return not getattr(trainer, "is_distributed_loading_by_transformers", False) and bool(holders_of(trainer.model))


def _save_model(original: Any, trainer: Any, output_dir: str | None = None, _internal_call: bool = False) -> Any:
    if not _is_ours(trainer):
        return original(trainer, output_dir, _internal_call)
    state = full_state_dict(trainer.model, keep=trainer.args.should_save)
    if trainer.args.should_save:
        trainer._save(trainer.args.output_dir if output_dir is None else output_dir, state_dict=state)
    if trainer.args.push_to_hub and not _internal_call:
        trainer.push_to_hub(commit_message="Model save", revision=getattr(trainer.args, "hub_revision", None))
    return None


def _save_optimizer(original: Any, trainer: Any, output_dir: str) -> Any:
    if not _is_ours(trainer):
        return original(trainer, output_dir)
    if trainer.args.should_save:
        warnings.warn(
            "experts are spread over ranks by moefuse.parallelize, and so are the states of their optimizer, which the Trainer does not "
            "save: this checkpoint has the model, and who resumes from it begins with a fresh optimizer and schedule, as with "
            "save_only_model=True",
            stacklevel=2,
        )
    return None


def _wrap(name: str, own: Any) -> None:
    original = getattr(Trainer, name, None)
    if original is None or hasattr(original, "moefuse"):
        return

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(original, self, *args, **kwargs)

    wrapper.moefuse = True  # type: ignore[attr-defined]
    setattr(Trainer, name, wrapper)


_wrap("save_model", _save_model)
_wrap("_save_optimizer_and_scheduler", _save_optimizer)
