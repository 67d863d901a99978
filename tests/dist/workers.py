"""Worker processes of one gloo group. A test sends them a function of this package; each rank runs it and sends back what it returns."""

from __future__ import annotations

import datetime
import gc
import itertools
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo

from moefuse.runtime import groups

TIMEOUT = 60
"""Seconds of a collective. A test that hangs fails after them."""
PRELOADED = ["tests.dist.preloaded"]
"""Imported once, by the process that all workers are forked from. CUDA does not survive a fork: workers with GPUs start anew."""


class WorkerError(AssertionError):
    """What a worker raised; the text has its traceback."""


class Workers:
    """``world`` processes that wait for work. Threads of torch: one each. ``cuda``: each has a GPU, and they have NCCL as well."""

    def __init__(self, world: int, timeout: int = TIMEOUT, cuda: bool = False) -> None:
        self.world = world
        self.broken = False
        """Whether a rank was lost, may be in the middle of a collective, or is not in step with the others."""
        context: Any = multiprocessing.get_context("spawn" if cuda else "forkserver")
        if not cuda:
            context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        pairs = [context.Pipe() for _ in range(world)]
        self.ends = [here for here, _ in pairs]
        self.processes = [
            context.Process(target=_serve, args=(rank, world, store, there, timeout, cuda), daemon=True)
            for rank, (_, there) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[..., Any], *args: Any, wait: float = 150, **named: Any) -> list[Any]:
        """``function(rank, *args, **named)`` on every rank; the results in the order of ranks.

        Raises:
            WorkerError: a rank raised, or died, or is not ready after ``wait`` seconds.
        """
        found = self.try_to(function, *args, wait=wait, **named)
        for rank, (ok, value) in enumerate(found):
            if not ok:
                self.broken = True
                raise WorkerError(f"rank {rank} of {self.world}: {value}")
        return [value for _, value in found]

    def try_to(self, function: Callable[..., Any], *args: Any, wait: float = 150, **named: Any) -> list[tuple[bool, Any]]:
        """As :meth:`run`: (True, result) or (False, traceback) of each rank."""
        for end in self.ends:
            end.send((function, args, named))
        return [self._received(end, wait) for end in self.ends]

    def _received(self, end: Connection, wait: float) -> tuple[bool, Any]:
        try:
            if end.poll(wait):
                ok, value, left = end.recv()
                self.broken = self.broken or left
                return ok, value
            said = f"not ready after {wait} s"
        except EOFError:
            said = "it died"
        self.broken = True
        return False, said

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()


class Groups:
    """The groups that all tests share, one for each number of ranks. One that a test has broken is replaced."""

    def __init__(self) -> None:
        self._of: dict[int, Workers] = {}

    def of(self, world: int) -> Workers:
        """A group that nobody has broken. Of more ranks than cores some wait longer for the others to compile."""
        known = self._of.get(world)
        if known is not None and not known.broken:
            return known
        if known is not None:
            known.close()
        self._of[world] = Workers(world, TIMEOUT if world == 2 else 4 * TIMEOUT)
        return self._of[world]

    def close(self) -> None:
        for workers in self._of.values():
            workers.close()


def _serve(rank: int, world: int, store: str, end: Connection, timeout: int, cuda: bool) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    import torch.distributed as dist

    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no multicast
    if cuda:
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=timeout)
    )
    environment = dict(os.environ)
    for number in itertools.count():
        try:
            function, args, named = end.recv()
        except (EOFError, KeyboardInterrupt):
            return
        _as_at_first(environment)
        try:
            answer = (True, function(rank, *args, **named))
        except BaseException:
            answer = (False, traceback.format_exc())
        world_group = groups.earlier(dist.group.WORLD)
        end.send((*answer, world_group is not None and bool(world_group.standing.left)))
        if number % 8 == 7:
            _smaller_heap()


def _as_at_first(environment: dict[str, str]) -> None:
    """What other tests have left behind decides nothing."""
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)
    torch.manual_seed(0)
    torch._dynamo.reset()


def _smaller_heap() -> None:
    """What Dynamo keeps is not looked at by every garbage collection, nor by every ``parallelize``, which looks for optimizers."""
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()
