"""The words of the command line. No import of moefuse or torch: ``moefuse_command.py`` runs this file by itself, for help at once."""

from __future__ import annotations

import argparse

INPUTS = "one word for each tensor: [DTYPE:]SHAPE[:BELOW], e.g. 2x16, bfloat16:4x64, int64:1x12:1000 (random numbers below 1000)"
SIZES = ("experts", "top_k", "hidden", "intermediate")
ACTIVATIONS = ("gelu", "gelu_tanh", "identity", "mish", "relu", "relu2", "sigmoid", "silu", "silu_clamp", "swiglu_oai", "tanh")
GATINGS = ("merged", "interleaved", "split", "plain")

MODEL = "a class or a function without arguments that gives the model; MODULE may be a file.py"


def parser(program: str, version: str) -> argparse.ArgumentParser:
    """The parser with all subcommands.

    Args:
        program: how the command was called.
        version: what ``--version`` prints.
    """
    top = argparse.ArgumentParser(prog=program, description="Fuse mixture-of-experts code under torch.compile.")
    top.add_argument("--version", action="version", version=f"moefuse {version}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, arguments) in COMMANDS.items():
        arguments(commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}."))
    return top


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODULE:NAME", help=MODEL)
    parser.add_argument("--hf", metavar="PATH", help="a transformers config.json, or a folder with one; random weights, no downloads")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="with --hf: so many layers of the model (default: 2)")
    parser.add_argument("--inputs", nargs="+", metavar="TENSOR", help=INPUTS)
    parser.add_argument("--train", action="store_true", help="in training mode, with gradients")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page, too")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _explain(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a layer is left as it was, or none is found")


def _bench(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    parser.add_argument(
        "--budget", type=float, default=60.0, metavar="SECONDS", help="time for the timing, compilations apart (default: 60)"
    )


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="compile nothing: only look whether there is a compiler")


def _warmup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODULE:NAME", help=MODEL)
    parser.add_argument("--inputs", nargs="+", metavar="TENSOR", help=INPUTS)
    parser.add_argument("--tokens", required=True, metavar="N,N,...", help="numbers of tokens of one forward pass, e.g. 1,8,512")
    parser.add_argument("--budget", type=float, default=120.0, metavar="SECONDS", help="time to take (default: 120)")
    sizes = parser.add_argument_group("sizes in the place of a model, measured on random weights")
    for name in SIZES:
        sizes.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")
    sizes.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    sizes.add_argument("--activation", default="silu", choices=ACTIVATIONS)
    sizes.add_argument("--gating", default="merged", choices=GATINGS)
    sizes.add_argument("--weights", default="stacked", choices=("stacked", "per_expert"))


def _cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("show", "clear"), help="show: folders and sizes; clear: remove what moefuse built and measured")
    parser.add_argument("--keep-measurements", action="store_true", help="with clear: leave what warmup measured")


COMMANDS = {
    "explain": ("say which mixture-of-experts layers of a model are fused, and what is in the way of the others", _explain),
    "bench": ("measure a model in eager, with Inductor and with moefuse; exit with 1 if a result is off or one does not run", _bench),
    "doctor": ("look whether this machine has what moefuse needs, and how to repair what is missing", _doctor),
    "warmup": ("measure the kernels on this GPU, for a model or for sizes", _warmup),
    "cache": ("show or remove what moefuse keeps on this machine", _cache),
}
"""Subcommands: what each is for, and what adds its arguments."""
