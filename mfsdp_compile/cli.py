"""The ``mfsdp`` command. Only the command that is run is imported: ``mfsdp --help`` needs no torch."""

from __future__ import annotations

import argparse
import atexit
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from mfsdp_compile import __version__
from mfsdp_compile._quick_imports import quick_imports
from mfsdp_compile.runtime.nearest import did_you_mean

Run = Callable[[argparse.Namespace], int]


class Command(NamedTuple):
    """A command of ``mfsdp``.

    Args:
        help: What it does, in a line.
        add: Function that imports the command and adds its arguments to a parser. Returns the function that runs it.
    """

    help: str
    add: Callable[[argparse.ArgumentParser], Run]


def command() -> int:
    """Run ``mfsdp`` as a program."""
    atexit.register(_hide_leaks)  # called last
    return main()


class _Parser(argparse.ArgumentParser):
    """A parser, also of commands, whose errors about unknown choices name the nearest one."""

    def error(self, message: str) -> NoReturn:
        if (found := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)) is not None:
            message += did_you_mean(found[1], re.findall(r"[\w.-]+", found[2]))
        super().error(message)


def _hide_leaks() -> None:
    """Hide the 34 lines about leaks in triton that nanobind prints when Python has ended."""
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, without the name of the program. Returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words and not words[0].startswith("-") else None
    parser = _Parser(prog="mfsdp", description="Sharded data-parallel training done by a compiler.")
    parser.add_argument("--version", action="version", version=f"mfsdp-compile {__version__}")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="command", title="commands")
    added = {each: parsers.add_parser(each, help=about.help) for each, about in COMMANDS.items()}
    if not words:
        parser.print_help(sys.stderr)
        return 2
    if name is None:
        parser.parse_args(words)  # ends the program: prints help or the version, or names a wrong option
        return 2
    if name not in COMMANDS:
        parser.error(f"there is no command {name!r}.{did_you_mean(name, COMMANDS)} mfsdp --help lists all.")
    with quick_imports():
        run = COMMANDS[name].add(added[name])
    return run(parser.parse_args(words))


def _plan(parser: argparse.ArgumentParser) -> Run:
    from mfsdp_compile.planning import commands

    commands.add_arguments(parser)
    return commands.run


def _doctor(parser: argparse.ArgumentParser) -> Run:
    from mfsdp_compile.diagnostics import doctor

    parser.add_argument(
        "--table", action="store_true", help="compute every strategy in every way of accumulating, on four processes"
    )
    return lambda given: doctor.run(given.table)


def _hang(parser: argparse.ArgumentParser) -> Run:
    from mfsdp_compile.diagnostics import hang

    parser.add_argument("folder", help="what MFSDP_DEBUG_DIR was set to")
    return lambda given: hang.run(given.folder)


def _convert(parser: argparse.ArgumentParser) -> Run:
    from mfsdp_compile.convert import commands

    commands.add_convert(parser)
    return commands.run


def _convert_from_torch_dist(parser: argparse.ArgumentParser) -> Run:
    run = _convert(parser)
    parser.set_defaults(source_format="torch_dist", format="fsdp_dtensor")
    return run


def _checkpoint(parser: argparse.ArgumentParser) -> Run:
    from mfsdp_compile.convert import commands

    commands.add_checkpoint(parser)
    return commands.run


def _param_groups(parser: argparse.ArgumentParser) -> Run:
    from mfsdp_compile.convert import commands

    commands.add_param_groups(parser)
    return commands.run


def _demo(parser: argparse.ArgumentParser) -> Run:
    from dataclasses import fields

    import torch

    from mfsdp_compile.demo import train

    gpus = torch.cuda.device_count()
    add = parser.add_argument
    add("--ranks", type=_positive, default=gpus or 2, help="processes (default: %(default)s)")
    add("--steps", type=_positive, default=60, help="optimizer steps (default: %(default)s)")
    add("--eager", action="store_true", help="eager hooks instead of torch.compile")
    add("--model", choices=["llama", "hf-llama"], default="llama", help="ours or Hugging Face's (default: %(default)s)")
    add("--batch", type=_positive, default=8, help="sequences per rank and step (default: %(default)s)")
    add("--length", type=_positive, default=128, help="bytes per sequence (default: %(default)s)")
    add("--lr", type=float, default=2e-3, help="of AdamW (default: %(default)s)")
    add("--parity-steps", type=int, default=12, help="steps that one process repeats; 0: none (default: %(default)s)")
    add("--out", default="demo-out", help="folder for report, losses and checkpoints (default: %(default)s)")
    add("--save-every", type=_positive, default=20, help="steps between checkpoints (default: %(default)s)")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out, for --steps more")
    add("--recalibrate", action="store_true", help="measure this machine again, for predictions (default: once)")
    add("--seed", type=int, default=0, help="of model and data (default: %(default)s)")
    names = [field.name for field in fields(train.DemoConfig)]
    return lambda given: train.run(train.DemoConfig(**{name: getattr(given, name) for name in names}))


def _calibrate(parser: argparse.ArgumentParser) -> Run:
    from pathlib import Path

    import torch

    from mfsdp_compile.planning import calibrated, calibration

    gpus = torch.cuda.device_count()
    add = parser.add_argument
    add("--out", default="hardware.json", metavar="FILE", help="what to write (default: %(default)s)")
    add("--ranks", type=_positive, default=gpus or 2, help="processes (default: %(default)s)")
    add("--name", help="of the machine (default: that of FILE)")
    add(
        "--model",
        help="measure products and attention in the shapes of this model, which mfsdp plan takes too (default: usual "
        "shapes)",
    )
    add("--batch", type=_positive, help="sequences per rank with --model (default: 1; demo: 8)")
    add("--seq", type=_positive, help="tokens per sequence with --model (default: the model's own)")

    def run(given: argparse.Namespace) -> int:
        try:
            shapes = calibrated.shapes_of_workload(given.model, given.batch, given.seq) if given.model else None
        except ValueError as error:
            print(error)
            return 2
        return calibration.calibrate(given.out, given.ranks, given.name or Path(given.out).stem, shapes=shapes)

    return run


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


# The last two are Megatron's names, in tools/checkpoint/checkpoint_inspector.py.
COMMANDS = {
    "demo": Command("train a small transformer on real text, sharded, and account for it", _demo),
    "doctor": Command("look at the installation; with --table, at the numbers", _doctor),
    "hang": Command("which rank keeps a job waiting, from what ranks have written", _hang),
    "calibrate": Command("measure this machine, for predictions of step times", _calibrate),
    "plan": Command("memory and step time of a training run on machines that are not here", _plan),
    "convert": Command("convert a checkpoint to another format", _convert),
    "checkpoint": Command("look into checkpoints, compare and edit them", _checkpoint),
    "print-torch-dcp-in-json": Command("the same as checkpoint param-groups", _param_groups),
    "convert-torch-dist-to-fsdp-dtensor": Command(
        "the same as convert --from torch_dist --to fsdp_dtensor", _convert_from_torch_dist
    ),
}

if __name__ == "__main__":
    raise SystemExit(command())
