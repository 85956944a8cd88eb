"""Code blocks of README.md, CONTRIBUTING.md and docs/, and how tests run each of them.

An HTML comment in front of a block, which readers do not see, says how:

    <!-- setup -->                  what the page's blocks begin with; it is run in front of each block that is "after
                                    the set-up": the last one above it <!-- run: on 2 ranks -->        on so many real
                                    ranks (gloo), whose process group exists already <!-- run: program on 2 ranks -->
                                    a whole program, which ``make long`` also runs unchanged, started by torchrun <!--
                                    run: as one of 8 ranks --> in this process, as the first of so many ranks, of which
                                    the others are fake <!-- run: without a process group --> <!-- run: on 2 ranks,
                                    after the set-up -->   also with the others <!-- run: shell NAME -->
                                    commands, one after the other, in a folder that NAME of :data:`FOLDERS` has filled
                                    <!-- goes on -->                continues the block before, with its names; commands
                                    run in its folder <!-- prints -->                 the output of the block before;
                                    ``...`` stands for anything <!-- check: commands -->        commands that are not
                                    run, but must exist with their options <!-- check: schedule -->        a schedule
                                    file <!-- not run: REASON -->        REASON is in :data:`NOT_RUN`; Python is
                                    compiled

``run`` and ``prints`` may end in ``, long``, which leaves them to ``make long``. What is run is what readers see: a
set-up and a block are a program, with every import, and with the command that starts as many ranks as the comment says.
The test adds two things. ``init_process_group`` and ``destroy_process_group`` do nothing where the test has a group.
Blocks are compiled operator by operator, so that hundreds of lines take seconds: ``inner`` is ``"aot_eager"`` unless a
block sets it.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import importlib
import io
import json
import os
import re
import shlex
import symtable
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

from mfsdp_compile import deterministic

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

NOT_RUN = {
    "a drawing": "no code at all",
    "a message": "of an error, which the test of messages compares with the sources",
    "here, but by tests/integrations/test_examples.py": "what leaves Trainer's and accelerate's global state behind",
    "here, but by tests/programs/test_compiled_files.py": "needs compile caches, which tests switch off",
    "here, but by tests/integrations/test_torchao.py": "needs torchao, which that test looks for",
    "here, but by tests/integrations/test_qlora.py": "needs bitsandbytes or torchao, which that test looks for",
    "a GPU is needed": "tests/gpu runs the like of it",
    "another package": "code of a package that is not installed here, to be compared with ours",
    "part of a program": "lines out of a program that is somebody else's",
}
COLUMNS = "137"
"""Columns of the terminal that commands print to, as wide as pages are."""
KINDS = ("setup", "run", "goes on", "prints", "check", "not run")
PLACES = re.compile(
    r"(?:(?P<program>program )?on (?P<ranks>\d+) ranks|as one of (?P<world>\d+) ranks|without a process group)"
    r"(?P<after>, after the set-up)?"
)
"""Where Python is run."""


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
        setup: The set-up above them on the page, if they are run after it; for blocks that are not run, the last one.
        prints: Output of the blocks, where the page shows it.
    """

    blocks: list[Block]
    setup: Block | None = None
    prints: list[Block] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self._where("after") and self.first.kind != "not run":
            self.setup = None

    def _where(self, name: str) -> str:
        found = PLACES.fullmatch(self.first.how) if self.first.kind == "run" else None
        return found[name] or "" if found else ""

    @property
    def first(self) -> Block:
        return self.blocks[0]

    @property
    def world_size(self) -> int:
        """World size if this process is one rank and the others are fake; else 0."""
        return int(self._where("world") or 0)

    @property
    def ranks(self) -> int:
        """Number of real ranks; 0 if there are none."""
        return int(self._where("ranks") or 0)

    @property
    def is_program(self) -> bool:
        return bool(self._where("program"))

    @property
    def is_long(self) -> bool:
        return any(block.is_long for block in [*self.blocks, *self.prints])

    @property
    def source(self) -> str:
        """The program that a reader puts together: the set-up and the blocks."""
        return "".join(block.text for block in [*([self.setup] if self.setup else []), *self.blocks])

    @property
    def visible_ranks(self) -> int:
        """Number of ranks that the program says it is started with, last; 0 if it says nothing."""
        found = re.findall(r"torchrun (?:--nnodes=(\d+) )?--nproc-per-node=(\d+)", self.source)
        return int(found[-1][0] or 1) * int(found[-1][1]) if found else 0

    def parts(self) -> list[tuple[str, str]]:
        """The set-up and the blocks of code, each with its output ("" if the page does not show it)."""
        found = [("\n" * self.setup.line + self.setup.text, "")] if self.setup else []
        for block in self.blocks:
            following = [other.line for other in self.blocks if other.line > block.line]
            wanted = [o.text for o in self.prints if block.line < o.line and all(o.line < line for line in following)]
            found.append(("\n" * block.line + block.text, "".join(wanted)))
        return found


_COMMENT = re.compile(
    r"<!--\s*(?P<kind>setup|run|goes on|prints|check|not run)\s*(?::\s*(?P<how>.*?))?(?P<long>,\s*long)?\s*-->\s*$"
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
    setup = None
    for block in blocks:
        if block.kind == "setup":
            setup = block
        elif block.kind == "goes on" and found:
            found[-1].blocks.append(block)
        elif block.kind == "prints" and found:
            found[-1].prints.append(block)
        else:
            found.append(Cell([block], setup))
    return found


def undefined_names(source: str) -> list[str]:
    """Return names that a program uses, here or in its functions, and never defines."""
    module = symtable.symtable(source, "page", "exec")
    defined = {s.get_name() for s in module.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    found = set()

    def visit(table: symtable.SymbolTable) -> None:
        for symbol in table.get_symbols():
            is_of_module = table is module or symbol.is_global()
            if is_of_module and symbol.is_referenced() and symbol.get_name() not in defined:
                found.add(symbol.get_name())
        for child in table.get_children():
            visit(child)

    visit(module)
    return sorted(name for name in found if not hasattr(builtins, name) and name not in ("__name__", "__file__"))


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


@contextlib.contextmanager
def _small_steps() -> Iterator[None]:
    """Compile operator by operator unless a block says how. A program finds its process group created."""
    from mfsdp_compile.backend import compile
    from mfsdp_compile.backend.options import CompileOptions

    of = CompileOptions.of

    def quick(options: Mapping[str, Any] | None, mode: str | None) -> CompileOptions:
        return of({"inner": "aot_eager", "verify": "once", **(options or {})}, mode)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(compile.CompileOptions, "of", staticmethod(quick)))
        if dist.is_initialized():
            stack.enter_context(mock.patch.object(dist, "init_process_group", return_value=None))
            stack.enter_context(mock.patch.object(dist, "destroy_process_group", return_value=None))
        yield


def run_python(page: str, parts: Sequence[tuple[str, str]], folder: str) -> str:
    """Run a set-up and blocks on this rank, in ``folder``.

    Returns how the output differs from the page, on the first rank; else "".
    """
    wrong, is_first = "", not dist.is_initialized() or dist.get_rank() == 0
    before = Path.cwd()
    os.chdir(folder)
    try:
        with warnings.catch_warnings(), _small_steps(), mock.patch.dict(os.environ):
            warnings.simplefilter("ignore")
            names: dict[str, Any] = {"__name__": "__main__"}
            for source, wanted in parts:
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    exec(compile(source, str(ROOT / page), "exec"), names)
                if wanted and is_first and not prints_as(wanted, out.getvalue()):
                    wrong = f"{page} says that this is printed:\n{wanted}\nand it is\n{out.getvalue()}"
    finally:
        os.chdir(before)
        deterministic(False)
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
        entry = {"at": 0.0, "step": step, "model": "Llama", "what": graph, "launches": [launch]}
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
