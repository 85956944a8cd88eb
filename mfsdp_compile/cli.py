"""The ``mfsdp`` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields

from mfsdp_compile import __version__

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mfsdp", description="Sharded data-parallel training done by a compiler.")
    parser.add_argument("--version", action="version", version=f"mfsdp-compile {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands.add_parser("demo", help="train a small transformer on real text, sharded, and account for it"))
    given = parser.parse_args(arguments)

    from mfsdp_compile.examples.demo import DemoConfig, run

    return run(DemoConfig(**{f.name: getattr(given, f.name) for f in fields(DemoConfig)}))


def _add_demo(parser: argparse.ArgumentParser) -> None:
    import torch

    gpus = torch.cuda.device_count()
    parser.add_argument("--ranks", type=int, default=gpus or 2, help="processes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--eager", action="store_true", help="eager hooks instead of torch.compile")
    parser.add_argument("--model", choices=["llama", "hf-llama"], default="llama", help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="bytes per sequence (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="of AdamW (default: %(default)s)")
    parser.add_argument(
        "--parity-steps", type=int, default=12, help="steps that one process repeats; 0: none (default: %(default)s)"
    )
    parser.add_argument("--out", default="demo-out", help="folder for curve and schedule (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)


if __name__ == "__main__":
    raise SystemExit(main())
