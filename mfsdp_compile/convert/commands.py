"""``mfsdp convert`` and ``mfsdp checkpoint``. Everything runs on the CPU, in one process, without a process group."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from mfsdp_compile.checkpoint.dcp_writer import new_output
from mfsdp_compile.checkpoint.errors import CheckpointError
from mfsdp_compile.checkpoint.manifest import damaged_files, read_manifest, seal
from mfsdp_compile.runtime.untrusted_files import FileRefused, inside, read_json, typed

from . import from_torch_dist, huggingface, inspect_checkpoint
from .conversion_plan import ConversionPlan
from .keys import Prefixes
from .param_groups import FILE_NAME, map_from_dcp, read_map, write_map
from .to_torch_dist import plan_to_torch_dist

FORMATS = ("torch_dist", "fsdp_dtensor", "huggingface")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the commands that look into checkpoints, compare and edit them."""
    commands = parser.add_subparsers(dest="checkpoint_command", required=True)
    parser = commands.add_parser("inspect", help="list what is in a checkpoint")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--keys", default="", metavar="REGEX", help="list only keys in which this is found")
    parser.add_argument("--groups", action="store_true", help="list the options of parameters' optimizer groups too")
    parser.set_defaults(handler=_inspect)

    parser = commands.add_parser(
        "verify", help="read every file and compare it with the manifest; exit status 1: damaged"
    )
    parser.add_argument("directory", type=Path)
    parser.set_defaults(handler=_verify)

    parser = commands.add_parser("print", help="print an entry")
    parser.add_argument("directory", type=Path)
    parser.add_argument("key")
    parser.add_argument("slice", nargs="?", help="of the tensor, for instance '0, :3'")
    parser.set_defaults(handler=_print)

    parser = commands.add_parser("compare", help="compare two checkpoints; exit status 1 if they differ")
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--atol", type=float, default=0.0, help="absolute tolerance (default: %(default)s)")
    parser.add_argument("--rtol", type=float, default=0.0, help="relative tolerance (default: %(default)s)")
    parser.set_defaults(handler=_compare)

    parser = commands.add_parser("rename", help="copy a checkpoint with keys renamed")
    _add_paths(parser)
    parser.add_argument(
        "rename", nargs="+", metavar="PATTERN REPLACEMENT", help=r"regular expressions, and what comes in their place"
    )
    parser.set_defaults(handler=_edit)

    parser = commands.add_parser("remove", help="copy a checkpoint without some entries")
    _add_paths(parser)
    parser.add_argument("patterns", nargs="*", metavar="pattern", help="regular expression; none: nothing is removed")
    parser.set_defaults(handler=_edit)

    add_param_groups(
        commands.add_parser(
            "param-groups", help="write param_to_param_group_map.json from a directory that Megatron dumped"
        )
    )


def run(given: argparse.Namespace) -> int:
    """Run a command that a function of this module has added. Returns the exit status.

    An error prints its reason and returns 2. Of several processes that torchrun has started, the first one does the
    work.
    """
    if os.environ.get("RANK", "0") != "0":
        return 0
    try:
        status: int = given.handler(given)
        return status
    except BrokenPipeError:  # a pager was closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CheckpointError, OSError) as error:
        print(f"mfsdp: {error}", file=sys.stderr)
        return 2


def add_param_groups(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``checkpoint param-groups``."""
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path, help=f"(default: {FILE_NAME} in the directory)")
    _add_prefix(parser, "model")
    parser.set_defaults(handler=_param_groups)


def _add_paths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="IN")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--dry-run", action="store_true", help="print what would be written, and write nothing")


def _add_prefix(parser: argparse.ArgumentParser, of: str) -> None:
    parser.add_argument(
        f"--{of}-prefix", default=getattr(Prefixes(), of), metavar="KEY", help="in fsdp_dtensor (default: %(default)s)"
    )


def add_convert(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``convert``."""
    parser.description = (
        "Convert between torch_dist (Megatron's 3D parallelism) and fsdp_dtensor, and between Hugging Face folders or "
        ".safetensors files and fsdp_dtensor, in both directions."
    )
    _add_paths(parser)
    parser.add_argument("--from", dest="source_format", choices=FORMATS, help="format of IN (default: seen from it)")
    parser.add_argument("--to", dest="format", choices=FORMATS, help="format of OUT (default: fsdp_dtensor)")
    for of in ("model", "optimizer", "groups"):
        _add_prefix(parser, of)
    megatron = parser.add_argument_group("torch_dist")
    megatron.add_argument(
        "--swiglu",
        action=argparse.BooleanOptionalAction,
        help="MLPs are gated: linear_fc1 is two halves in fsdp_dtensor (default: as the training arguments say)",
    )
    megatron.add_argument("--swiglu-modules", default="", metavar="A,B", help="only modules of these names are gated")
    megatron.add_argument(
        "--rename-mtp-keys",
        action=argparse.BooleanOptionalAction,
        help="multi-token prediction: transformer_layer to mtp_model_layer (default: where found)",
    )
    megatron.add_argument(
        "--layers", choices=["stacked", "indexed"], help="to torch_dist (default: as before, or else stacked)"
    )
    megatron.add_argument(
        "--flatten-optimizer",
        action="store_true",
        help="to torch_dist: flatten states, as older Megatron-LM wants them",
    )
    megatron.add_argument("--param-to-param-group-map-json", type=Path, metavar="FILE", help="groups of the optimizer")
    hub = parser.add_argument_group("Hugging Face")
    hub.add_argument("--dtype", type=_dtype, help="of weights at export: float32, bfloat16, float16, ...")
    hub.add_argument(
        "--max-shard-size", type=_size, default=huggingface.MAX_SHARD_BYTES, help="of a file (default: 5GB)"
    )
    hub.add_argument(
        "--files-from",
        type=Path,
        metavar="FOLDER",
        help="config, tokenizer and so on (default: those that IN came with)",
    )
    tying = hub.add_mutually_exclusive_group()
    tying.add_argument("--tie", type=_pair, action="append", metavar="NAME=OF", help="a weight that is another's data")
    tying.add_argument("--no-tied", action="store_true", help="tie nothing, whatever config.json says")
    parser.set_defaults(handler=_convert)


def _convert(given: argparse.Namespace) -> int:
    return _carry_out(_plan(given), given)


def _plan(given: argparse.Namespace) -> ConversionPlan:
    source: Path = given.source
    if not source.exists():
        raise CheckpointError(f"{source} does not exist.")
    source_format = given.source_format or _format_of(source)
    single = given.out.suffix == ".safetensors"
    to = given.format or ("huggingface" if single else "fsdp_dtensor")
    try:
        prefixes = Prefixes(given.model_prefix, given.optimizer_prefix, given.groups_prefix)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    megatron = from_torch_dist.TorchDistOptions(
        prefixes=prefixes,
        swiglu=given.swiglu,
        swiglu_modules=tuple(name for name in given.swiglu_modules.split(",") if name),
        rename_mtp=given.rename_mtp_keys,
        stack_layers=None if given.layers is None else given.layers == "stacked",
        flatten_optimizer=given.flatten_optimizer,
        group_map=read_map(given.param_to_param_group_map_json) if given.param_to_param_group_map_json else None,
    )
    tied = [] if given.no_tied else given.tie
    hub = huggingface.HuggingFaceOptions(prefixes, tied, given.dtype, given.max_shard_size, given.files_from)
    planners: dict[tuple[str, str], Callable[[], ConversionPlan]] = {
        ("torch_dist", "fsdp_dtensor"): lambda: from_torch_dist.plan_to_fsdp(source, megatron),
        ("fsdp_dtensor", "torch_dist"): lambda: plan_to_torch_dist(source, megatron),
        ("huggingface", "fsdp_dtensor"): lambda: huggingface.plan_from_huggingface(source, hub),
        ("fsdp_dtensor", "huggingface"): lambda: huggingface.plan_to_huggingface(source, hub, single),
    }
    if (source_format, to) in planners:
        return planners[source_format, to]()
    if source_format == to:
        raise CheckpointError(
            f"{source} is {source_format} already. Pass the format to convert to with --to: {', '.join(FORMATS)}."
        )
    raise CheckpointError(
        f"{source} is {source_format}: its parameters are split and named differently from those of {to}, in a way "
        "specific to each model. Use the model's own converter (Megatron Bridge)."
    )


def _format_of(source: Path) -> str:
    if source.is_file() or not (source / ".metadata").exists():
        if source.suffix == ".safetensors" or any(source.glob("*.safetensors*")):
            return "huggingface"
        raise CheckpointError(
            f"{source} is not a known checkpoint. Known are a directory with .metadata (torch_dist, fsdp_dtensor), a "
            "directory with .safetensors files, and a .safetensors file."
        )
    return "torch_dist" if (source / "common.pt").exists() or _says_torch_dist(source) else "fsdp_dtensor"


def _says_torch_dist(source: Path) -> bool:
    try:
        found = typed(read_json(inside(source, "metadata.json")), dict, "metadata.json")
        return found.get("sharded_backend") == "torch_dist"
    except (OSError, FileRefused):
        return False


def _carry_out(plan: ConversionPlan, given: argparse.Namespace) -> int:
    source, out = given.source.resolve(), given.out.resolve()
    if source == out or source in out.parents or out in source.parents:
        raise CheckpointError(
            f"one of IN and OUT is inside the other: {given.source}, {given.out}. Choose another OUT."
        )
    if given.dry_run:
        print("\n".join(plan.lines()))
        return 0
    with (
        new_output(given.out, given.overwrite, plan.nbytes) as partial,
        _progress(plan.nbytes, given.out.name) as advance,
    ):
        plan.write(partial, advance)
        if (partial / ".metadata").exists():
            seal(partial, read_manifest(source))
    reasons: dict[str, list[str]] = {}
    for key, why in plan.left_out:
        reasons.setdefault(why, []).append(key)
    for why, keys in reasons.items():
        print(f"left out: {keys[0]}{f' and {len(keys) - 1} more' if len(keys) > 1 else ''}: {why}")
    for note in plan.notes:
        print(f"note: {note}")
    print(f"{given.out}: {plan.lines()[-1]}")
    return 0


@contextlib.contextmanager
def _progress(total: int, name: str) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr. Yields a function that takes the number of bytes that were written."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield functools.partial(bar.advance, bar.add_task(name, total=total))


def _inspect(given: argparse.Namespace) -> int:
    for line in inspect_checkpoint.describe(given.directory, given.keys, given.groups):
        print(line)
    return 0


def _verify(given: argparse.Namespace) -> int:
    manifest = read_manifest(given.directory)
    if manifest is None:
        raise CheckpointError(f"{given.directory} has no manifest, so there is nothing to compare its files with.")
    found = damaged_files(given.directory, manifest.files, sorted(manifest.files))
    for line in found:
        print(line)
    size = sum(record.bytes for record in manifest.files.values())
    print("damaged" if found else f"{len(manifest.files)} files, {size:,} bytes, as they were written")
    return 1 if found else 0


def _print(given: argparse.Namespace) -> int:
    print(inspect_checkpoint.show(given.directory, given.key, given.slice))
    return 0


def _compare(given: argparse.Namespace) -> int:
    differences = inspect_checkpoint.compare(given.first, given.second, given.atol, given.rtol)
    for line in differences:
        print(line)
    print(f"{len(differences)} differences" if differences else "the same")
    return 1 if differences else 0


def _edit(given: argparse.Namespace) -> int:
    pairs = getattr(given, "rename", [])
    if len(pairs) % 2:
        raise CheckpointError(f"{pairs[-1]!r} has no replacement: pass pairs of a pattern and a replacement.")
    rename = list(zip(pairs[::2], pairs[1::2], strict=True))
    return _carry_out(inspect_checkpoint.plan_edit(given.source, rename, getattr(given, "patterns", [])), given)


def _param_groups(given: argparse.Namespace) -> int:
    out = given.out or given.directory / FILE_NAME
    mapped = map_from_dcp(given.directory, given.model_prefix)
    with new_output(out, overwrite=True) as partial:
        write_map(mapped, partial)
    print(f"{out}: {len(mapped)} parameters in {len(set(mapped.values()))} groups")
    return 0


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise argparse.ArgumentTypeError(f"{text!r} is not a floating-point dtype: float32, bfloat16, float16, ...")
    return dtype


def _size(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    number = (
        int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")) if match else 0
    )
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: 5GB, 500MB, 2GiB, ...")
    return number


def _pair(text: str) -> tuple[str, str]:
    name, _, other = text.partition("=")
    if not name or not other:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=OF")
    return name, other
