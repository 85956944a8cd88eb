"""The ``mfsdp`` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields

from mfsdp_compile import __version__
from mfsdp_compile._quick_imports import quick_imports

with quick_imports():
    from mfsdp_compile.convert import commands as convert
    from mfsdp_compile.planning import commands as planning

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mfsdp", description="Sharded data-parallel training done by a compiler.")
    parser.add_argument("--version", action="version", version=f"mfsdp-compile {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands.add_parser("demo", help="train a small transformer on real text, sharded, and account for it"))
    doctor = commands.add_parser("doctor", help="look at the installation; with --table, at the numbers")
    doctor.add_argument(
        "--table", action="store_true", help="compute every strategy in every way of accumulating, on four processes"
    )
    hang = commands.add_parser("hang", help="which rank keeps a job waiting, from what ranks have written")
    hang.add_argument("folder", help="what MFSDP_DEBUG_DIR was set to")
    _add_calibrate(commands.add_parser("calibrate", help="measure this machine, for predictions of step times"))
    planning.add_arguments(
        commands.add_parser("plan", help="memory and step time of a training run on machines that are not here")
    )
    convert.add_commands(commands)
    given = parser.parse_args(arguments)
    if hasattr(given, "handler"):
        return convert.run(given)
    if given.command == "plan":
        return planning.run(given)

    if given.command == "doctor":
        from mfsdp_compile.diagnostics import doctor as the_doctor

        return the_doctor.run(given.table)

    if given.command == "hang":
        from mfsdp_compile.diagnostics import hang as the_hang

        return the_hang.run(given.folder)

    if given.command == "calibrate":
        from pathlib import Path

        from mfsdp_compile.planning import calibrated, calibration

        try:
            shapes = calibrated.shapes_of_workload(given.model, given.batch, given.seq) if given.model else None
        except ValueError as error:
            print(error)
            return 2
        return calibration.calibrate(given.out, given.ranks, given.name or Path(given.out).stem, shapes=shapes)

    from mfsdp_compile.demo.train import DemoConfig, run

    return run(DemoConfig(**{f.name: getattr(given, f.name) for f in fields(DemoConfig)}))


def _add_demo(parser: argparse.ArgumentParser) -> None:
    import torch

    gpus = torch.cuda.device_count()
    parser.add_argument("--ranks", type=_positive, default=gpus or 2, help="processes (default: %(default)s)")
    parser.add_argument("--steps", type=_positive, default=60, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--eager", action="store_true", help="eager hooks instead of torch.compile")
    parser.add_argument(
        "--model", choices=["llama", "hf-llama"], default="llama", help="ours or Hugging Face's (default: %(default)s)"
    )
    parser.add_argument("--batch", type=_positive, default=8, help="sequences per rank and step (default: %(default)s)")
    parser.add_argument("--length", type=_positive, default=128, help="bytes per sequence (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="of AdamW (default: %(default)s)")
    parser.add_argument(
        "--parity-steps", type=int, default=12, help="steps that one process repeats; 0: none (default: %(default)s)"
    )
    parser.add_argument(
        "--out", default="demo-out", help="folder for curve, schedule and checkpoints (default: %(default)s)"
    )
    parser.add_argument(
        "--save-every", type=_positive, default=20, help="steps between checkpoints (default: %(default)s)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint in --out, for --steps more"
    )
    parser.add_argument(
        "--recalibrate", action="store_true", help="measure this machine again, for predictions (default: once)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of model and data (default: %(default)s)")


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    import torch

    gpus = torch.cuda.device_count()
    parser.add_argument("--out", default="hardware.json", metavar="FILE", help="what to write (default: %(default)s)")
    parser.add_argument("--ranks", type=_positive, default=gpus or 2, help="processes (default: %(default)s)")
    parser.add_argument("--name", help="of the machine (default: that of FILE)")
    parser.add_argument(
        "--model",
        help="measure products and attention in the shapes of this model, which mfsdp plan takes too (default: usual shapes)",
    )
    parser.add_argument("--batch", type=_positive, help="sequences per rank with --model (default: 1; demo: 8)")
    parser.add_argument("--seq", type=_positive, help="tokens per sequence with --model (default: the model's own)")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
