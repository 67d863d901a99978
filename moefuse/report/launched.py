"""Where the host decides how long a call takes: a note of the report, with the remedy."""

from __future__ import annotations

from moefuse.report.report import FusionReport

FEW = 1024
"""Tokens up to which the host takes longer to launch a layer of Qwen3-30B-A3B's sizes on an H200 than its kernels take (docs/benchmarks.md,
"In default mode"). Of smaller experts it is more."""
NOTE = (
    "with {tokens} tokens the host may take longer to launch the kernels than they take: "
    'torch.compile(.., mode="reduce-overhead") records a call in a CUDA graph'
)


def note(report: FusionReport, records_graphs: bool) -> None:
    """Add it to a report of calls of few tokens that are launched; ``records_graphs``: they are not."""
    few = sorted({entry.tokens for entry in report.fused if entry.tokens is not None and entry.tokens <= FEW})
    if few and not records_graphs:
        report.notes.append(NOTE.format(tokens=" and ".join(map(str, few))))
