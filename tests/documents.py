"""Code blocks of README.md, CONTRIBUTING.md and docs/, and how tests run each of them.

An HTML comment in front of a block, which readers do not see, says how:

    <!-- run: NAME -->              in this process, as one rank of four, of which the others are fake. NAME is in
                                    :data:`WORLDS`, which says what is already defined for the block
    <!-- run: NAME in a world of 8 -->   the same, as one rank of eight
    <!-- run: NAME without a process group -->
    <!-- run: NAME on 2 ranks -->   on so many real ranks (gloo)
    <!-- run: shell NAME -->        commands, one after the other, in a folder that NAME of :data:`FOLDERS` has filled
    <!-- goes on -->                continues the block before, with its variables; commands run in its folder
    <!-- prints -->                 the output of the block before; ``...`` stands for anything
    <!-- check: commands -->        commands that are not run, but must exist with their options
    <!-- check: schedule -->        a schedule file
    <!-- not run: REASON -->        REASON is in :data:`NOT_RUN`; Python is compiled

``run`` and ``prints`` may end in ``, long``, which leaves them to ``make long``. Blocks are computed on the CPU and
operator by operator, so that hundreds of lines take seconds: ``"cuda"`` becomes ``"cpu"``, and ``inner`` is
``"aot_eager"`` unless a block sets it. ``make long`` runs whole programs unchanged.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import io
import json
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from markdown_it import MarkdownIt
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

NOT_RUN = {
    "a drawing": "no code at all",
    "a message": "of an error, which the test of messages compares with the sources",
    "here, but by tests/integrations/test_examples.py": "what leaves Trainer's and accelerate's global state behind",
    "here, but by tests/integrations/test_torchao.py": "needs torchao, which that test looks for",
    "a GPU is needed": "tests/gpu runs the like of it",
    "another package": "code of a package that is not installed here, to be compared with ours",
    "part of a program": "lines out of a program that is somebody else's",
}
COLUMNS = "137"
"""Columns of the terminal that commands print to, as wide as pages are."""
KINDS = ("run", "goes on", "prints", "check", "not run")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        page: Path of the page, relative to the repository.
        line: Line of its fence, from 1.
        language: Language named after the fence.
        text: Text inside the fence.
        kind: One of :data:`KINDS`; empty if there is no comment.
        how: Rest of the comment, after the kind.
        is_long: Whether only ``make long`` runs it.
    """

    page: str
    line: int
    language: str
    text: str
    kind: str
    how: str
    is_long: bool

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass
class Cell:
    """A block and the blocks that continue it.

    Args:
        blocks: Blocks of code.
        prints: Output of the blocks, where the page shows it.
    """

    blocks: list[Block]
    prints: list[Block] = field(default_factory=list)

    @property
    def first(self) -> Block:
        return self.blocks[0]

    @property
    def world(self) -> str:
        return self.first.how.split()[0]

    @property
    def world_size(self) -> int:
        """World size if this process is one rank and the others are fake; 0 if there is no process group."""
        found = re.search(r" in a world of (\d+)$", self.first.how)
        return int(found[1]) if found else 0 if self.first.how.endswith("without a process group") else 4

    @property
    def ranks(self) -> int:
        """Number of real ranks; 0 if there are none."""
        found = re.search(r" on (\d+) ranks$", self.first.how)
        return int(found[1]) if found else 0

    @property
    def is_long(self) -> bool:
        return any(block.is_long for block in [*self.blocks, *self.prints])

    def parts(self) -> list[tuple[str, str]]:
        """Blocks of code, each with its output ("" if the page does not show it)."""
        found = []
        for block in self.blocks:
            following = [other.line for other in self.blocks if other.line > block.line]
            wanted = [o.text for o in self.prints if block.line < o.line and all(o.line < line for line in following)]
            found.append(("\n" * block.line + block.text, "".join(wanted)))
        return found


_COMMENT = re.compile(
    r"<!--\s*(?P<kind>run|goes on|prints|check|not run)\s*(?::\s*(?P<how>.*?))?(?P<long>,\s*long)?\s*-->\s*$"
)


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page.

    Raises:
        AssertionError: Something looks like a fence and is none, such as an indented one. Nothing would run it.
    """
    text = page.read_text(encoding="utf-8")
    lines = text.split("\n")
    found = []
    for token in MarkdownIt().parse(text):
        if token.type != "fence":
            continue
        assert token.map is not None
        before = lines[token.map[0] - 1] if token.map[0] else ""
        match = _COMMENT.match(before)
        kind, how, is_long = (match["kind"], match["how"] or "", bool(match["long"])) if match else ("", "", False)
        name = page.relative_to(ROOT).as_posix()
        found.append(Block(name, token.map[0] + 1, token.info.strip(), token.content, kind, how.strip(), is_long))
    fences = sum(line.lstrip().startswith("```") for line in lines)
    assert fences == 2 * len(found), f"{page.name} has {fences} lines that look like fences, and {len(found)} blocks"
    return found


def cells_of(blocks: Sequence[Block]) -> list[Cell]:
    """Return the cells of a page in order, including those that are only checked."""
    found: list[Cell] = []
    for block in blocks:
        if block.kind == "goes on" and found:
            found[-1].blocks.append(block)
        elif block.kind == "prints" and found:
            found[-1].prints.append(block)
        else:
            found.append(Cell([block]))
    return found


def prints_as(wanted: str, got: str, torch_version: str = torch.__version__) -> bool:
    """Whether a program printed what a page shows. ``...`` stands for anything in a line, or for whole lines if alone.

    Pages show the numbers of torch 2.13, which ``make test`` installs. Other versions trace some functions into more or
    fewer operators, so numbers are not compared there.
    """
    if not torch_version.startswith("2.13."):
        wanted, got = (re.sub(r"\d[\d,.]*", "0", text) for text in (wanted, got))
    pattern = ""
    for line in wanted.rstrip().split("\n"):
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += r".*?".join(map(re.escape, line.rstrip().split("..."))) + r"[ \t]*\n"
    return re.fullmatch(pattern, got.strip("\n") + "\n") is not None


# -- running Python ---------------------------------------------------------------------------------------------------


def _basics() -> dict[str, Any]:
    """Names that blocks use without importing them, as lines of a program that has imported them."""
    import mfsdp_compile
    from mfsdp_compile.models.llama import Block as LlamaBlock
    from mfsdp_compile.models.llama import Llama, LlamaConfig

    return {
        "__name__": "__main__",
        "torch": torch,
        "nn": nn,
        "dist": dist,
        "mfsdp_compile": mfsdp_compile,
        "Block": LlamaBlock,
        "Llama": Llama,
        "LlamaConfig": LlamaConfig,
        **{name: getattr(mfsdp_compile, name) for name in mfsdp_compile.__all__ if not name.startswith("_")},
    }


def _unsharded() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    names = _basics()
    config = names["LlamaConfig"](vocabulary=64, width=32, layers=2, heads=4, kv_heads=2, hidden=48)
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
    inputs = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    return {**names, **inputs, "config": config, "init_device_mesh": init_device_mesh, "model": names["Llama"](config)}


def _training() -> dict[str, Any]:
    """A sharded model, compiled and not compiled, its optimizer, and other names of a training loop."""
    names = _unsharded()
    model = names["fully_shard_model"](names["model"], fsdp_unit_modules=[names["Block"]])
    optimizer = names["fully_shard_optimizer"](torch.optim.AdamW(model.parameters()))
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    batches = [(names["tokens"], names["targets"])] * 3
    compiled = torch.compile(model, backend="mfsdp")
    more = {"model": model, "optimizer": optimizer, "schedule": schedule, "batches": batches, "compiled": compiled}
    return {**names, **more, "step": 100}


def _tensor() -> dict[str, Any]:
    """A model, and its division over two tensor-parallel ranks."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = ("attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up")
    plan: dict[str, Any] = {f"layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"layers.*.{name}": RowwiseParallel() for name in ("attention.out", "feed_forward.down")}
    return {**_unsharded(), "parallelize_module": parallelize_module, "dp": 2, "tp": 2, "plan": plan}


def _experts() -> dict[str, Any]:
    """A mixture of experts, built for the ranks of a group."""
    from torch.distributed.device_mesh import init_device_mesh

    from mfsdp_compile.models.moe import MoeBlock, MoeConfig, MoeLlama

    config = MoeConfig(64, 32, 2, 4, 2, 48, experts=4, chosen=2)

    def build(expert_group: dist.ProcessGroup) -> nn.Module:
        torch.manual_seed(0)
        return MoeLlama(config, expert_group)

    return {**_basics(), "init_device_mesh": init_device_mesh, "Model": build, "Block": MoeBlock}


def _demo() -> dict[str, Any]:
    """The model of ``mfsdp demo``, with three layers."""
    names = _basics()
    torch.manual_seed(0)
    model = names["fully_shard_model"](
        names["Llama"](names["LlamaConfig"](layers=3)), fsdp_unit_modules=[names["Block"]]
    )
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    return {**names, "model": model, "tokens": tokens, "targets": tokens}


def _passes() -> dict[str, Any]:
    """Names that a file of this package's passes imports."""
    from torch import fx

    from mfsdp_compile.passes import roles
    from mfsdp_compile.passes.context import Context, Report
    from mfsdp_compile.passes.phase import Phase

    return {**_training(), "fx": fx, "roles": roles, "Context": Context, "Phase": Phase, "Report": Report}


def _folder() -> dict[str, Any]:
    """A Hugging Face folder, ``llama-folder``."""
    if dist.get_rank() == 0:
        _llama().save_pretrained("llama-folder")
    dist.barrier()
    return _basics()


def _megatron() -> dict[str, Any]:
    """Names that a script for Megatron has built, with our Llama in place of its GPT."""
    names = _unsharded()
    from mfsdp_compile import megatron

    def build(config: Any) -> nn.Module:
        return names["Llama"](names["config"])

    return {
        **names,
        "argparse": argparse,
        "add_megatron_fsdp_arguments": megatron.add_megatron_fsdp_arguments,
        "config_from_arguments": megatron.config_from_arguments,
        "TransformerLayer": names["Block"],
        "LanguageModelEmbedding": nn.Embedding,
        "GPTModel": build,
        "build": build,
        "model_config": megatron.TransformerConfig(),
        "loss_fn": lambda logits, labels: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        "folder": "checkpoint",
    }


WORLDS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "program": dict,
    "nothing": _basics,
    "unsharded": _unsharded,
    "training": _training,
    "tensor": _tensor,
    "experts": _experts,
    "demo": _demo,
    "passes": _passes,
    "folder": _folder,
    "megatron": _megatron,
}


@contextlib.contextmanager
def _small_steps(is_program: bool) -> Iterator[None]:
    """Compile operator by operator unless a block says how. A program finds its process group created."""
    from mfsdp_compile.backend import compile
    from mfsdp_compile.backend.options import CompileOptions

    of = CompileOptions.of

    def quick(options: Mapping[str, Any] | None, mode: str | None) -> CompileOptions:
        return of({"inner": "aot_eager", "verify": "once", **(options or {})}, mode)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(compile.CompileOptions, "of", staticmethod(quick)))
        if is_program:
            stack.enter_context(mock.patch.object(dist, "init_process_group", return_value=None))
            stack.enter_context(mock.patch.object(dist, "destroy_process_group", return_value=None))
        yield


def run_python(page: str, world: str, parts: Sequence[tuple[str, str]], folder: str) -> str:
    """Run blocks on this rank, in ``folder``.

    Returns how the output differs from the page, on the first rank; else "".
    """
    wrong, is_first = "", not dist.is_initialized() or dist.get_rank() == 0
    before = Path.cwd()
    os.chdir(folder)
    try:
        with warnings.catch_warnings(), _small_steps(world == "program"):
            warnings.simplefilter("ignore")
            names = WORLDS[world]()
            for source, wanted in parts:
                out = io.StringIO()
                code = compile(source.replace('"cuda"', '"cpu"'), str(ROOT / page), "exec")
                with contextlib.redirect_stdout(out):
                    exec(code, names)
                if wanted and is_first and not prints_as(wanted, out.getvalue()):
                    wrong = f"{page} says that this is printed:\n{wanted}\nand it is\n{out.getvalue()}"
    finally:
        os.chdir(before)
    return wrong


# -- commands ---------------------------------------------------------------------------------------------------------


def commands_of(text: str) -> list[tuple[list[str], str]]:
    """Return the commands of a block, each with its output: lines that begin with ``$``, or all lines if none does."""
    lines = text.rstrip().split("\n")
    found: list[tuple[list[str], list[str]]] = []
    prompts = any(line.startswith("$ ") for line in lines)
    for line in lines:
        if not prompts or line.startswith("$ "):
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words:
                found.append((words, []))
        elif found:
            found[-1][1].append(line)
    return [(words, "\n".join(output).strip("\n")) for words, output in found]


def check_command(words: Sequence[str]) -> None:
    """Raise AssertionError unless a command and its options exist. Runs nothing."""
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    program, *rest = words
    if program == "mfsdp":
        _check_mfsdp(rest)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for word in rest:
            name, is_variable, _ = word.partition("=")
            assert re.search(rf"^{name} *\?=" if is_variable else rf"^{name}:", makefile, re.MULTILINE), word
    elif program == "torchrun":
        run = importlib.import_module("torch.distributed.run")
        with contextlib.redirect_stderr(io.StringIO()) as complaint:
            try:
                run.get_args_parser().parse_args(rest)
            except SystemExit:
                raise AssertionError(complaint.getvalue()) from None
    elif program in ("pip", "python", "pytest"):
        for word in rest:
            if word.endswith(".py"):
                assert (ROOT / word.partition("::")[0]).is_file() or word == "train.py", f"there is no {word}"
    else:
        raise AssertionError(f"no test knows the program {program!r}")


def _check_mfsdp(words: Sequence[str]) -> None:
    from mfsdp_compile import cli

    class Parsed(Exception):
        pass

    parse_args = argparse.ArgumentParser.parse_args

    def parse(parser: argparse.ArgumentParser, given: Sequence[str]) -> None:
        parse_args(parser, given)
        raise Parsed

    with (
        contextlib.redirect_stderr(io.StringIO()) as complaint,
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse),
    ):
        try:
            cli.main(list(words))
        except Parsed:
            return
        except SystemExit as stopped:
            raise AssertionError(complaint.getvalue()) from stopped


def run_command(words: Sequence[str], folder: Path) -> str:
    """Run ``mfsdp ...`` in this process and in ``folder``. Returns what it prints.

    Raises:
        AssertionError: The command fails.
    """
    from mfsdp_compile import cli

    assert words[0] == "mfsdp", f"only mfsdp is run, not {words[0]}"
    before, out = Path.cwd(), io.StringIO()
    os.chdir(folder)
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
            warnings.catch_warnings(),
            mock.patch.dict(os.environ, COLUMNS=COLUMNS),
        ):
            warnings.simplefilter("ignore")
            status = cli.main(list(words[1:]))
    finally:
        os.chdir(before)
    assert not status, f"{shlex.join(words)} ended with {status}:\n{out.getvalue()}"
    return out.getvalue()


def _nothing(folder: Path) -> None:
    """Leave the folder empty, for commands that need no files."""


def _hang(folder: Path) -> None:
    """Write the records of two ranks, one of which waits for its data."""

    def state(rank: int, started: int, what: str, graph: str, step: int, place: str | None) -> list[dict[str, Any]]:
        launch = {"what": what, "group": "0", "number": started, "started": True}
        entry = {"at": 0.0, "step": step, "model": "Llama #1", "what": graph, "launches": [launch]}
        groups = {"0": {"ranks": [0, 1], "started": started}}
        about = {"host": f"node-{'ab'[rank]}", "why": "nothing new for 360 s", "place": place, "stacks": []}
        return [{"rank": rank, "world_size": 2, "groups": groups, "entries": [entry], **about}]

    where = folder / "folder" / "hang"
    where.mkdir(parents=True)
    ranks = [
        state(0, 22, "gather layers.0", "forward graph", 3, None),
        state(1, 21, "reduce layers.0", "backward graph", 2, "/home/me/train.py:41 in main: batch = next(batches)"),
    ]
    for rank, content in enumerate(ranks):
        (where / f"rank-{rank}.json").write_text(json.dumps(content))


def _llama() -> Any:
    """Build a Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def _checkpoints(folder: Path) -> None:
    """Write a Hugging Face folder, a checkpoint of this package of the same model, and one of Megatron."""
    from megatron_files import write_torch_dist

    from mfsdp_compile import fully_shard_model, fully_shard_optimizer
    from mfsdp_compile.checkpoint import Checkpoints

    model = _llama()
    model.save_pretrained(folder / "llama-folder")
    write_torch_dist(folder / "megatron" / "iter_0001000")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        sharded = fully_shard_model(model, fsdp_unit_modules="auto")
        optimizer = fully_shard_optimizer(torch.optim.AdamW(sharded.parameters()))
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        sharded(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        Checkpoints(folder / "runs" / "a").save(100, sharded, optimizer, extra={"tokens": 4})
    finally:
        dist.destroy_process_group()


FOLDERS: Mapping[str, Callable[[Path], None]] = {"empty": _nothing, "hang": _hang, "checkpoints": _checkpoints}


def is_python(text: str) -> bool:
    with contextlib.suppress(SyntaxError):
        ast.parse(text)
        return True
    return False


def torchrun(ranks: int, program: Path, seconds: float) -> str:
    """Run a program as its first line says. Returns what it prints."""
    import subprocess

    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(program)]
    done = subprocess.run(words, cwd=program.parent, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
