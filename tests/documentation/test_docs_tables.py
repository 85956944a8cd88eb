"""Tables in docs/ contain every argument, field, method, key or option of their subject, and no others."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from doc_tables import check_table
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel

from mfsdp_compile import MegatronFSDP, cli, fsdp2, fully_shard_model
from mfsdp_compile.backend.options import CompileOptions
from mfsdp_compile.fsdp2.module import REFUSED
from mfsdp_compile.integrations.deepspeed import KEYS, ZERO_KEYS
from mfsdp_compile.passes.verifier.rules import RULES
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy
from mfsdp_compile.sharding_arguments import Arguments

DOCS = Path(__file__).resolve().parents[2] / "docs"

_KEYS = """
stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint offload_param offload_optimizer zenflow
sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload stage3_prefetch_bucket_size
stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters
stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential stage3_gather_fp16_weights_on_model_save
ignore_unused_parameters legacy_stage1 round_robin_gradients zero_hpz_partition_size zero_quantized_weights
zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param mics_shard_size
mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint override_module_apply
log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module
"""
DEEPSPEED = _KEYS.split()
"""Fields of ``DeepSpeedZeroConfig``, by the names that its configuration files have: github.com/deepspeedai/DeepSpeed,
deepspeed/runtime/zero/config.py at edaa722."""


def parameters(function: object) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]  # type: ignore[arg-type]


def fields(policy: type) -> list[str]:
    return [field.name for field in dataclasses.fields(policy)]


def methods(kind: type) -> list[str]:
    return [name for name, value in vars(kind).items() if inspect.isfunction(value) and not name.startswith("_")]


def rows(page: str, table: str, marker: str = "arguments") -> dict[str, str]:
    """Return the names in the first column of ``<!-- arguments: table -->``, each with the rest of its row."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.search(rf"<!-- {marker}: {re.escape(table)} -->\n(.*?)<!-- end -->", text, re.DOTALL)
    assert found is not None, f"{page} has no table {table!r}"
    lines = [line for line in found[1].splitlines() if line.startswith("| `")]
    pairs = [re.fullmatch(r"\| `(\w+)` \| (.+) \|", line) for line in lines]
    assert all(pairs), f"{page}, table {table!r}: a row has no name and no words"
    names = [pair[1] for pair in pairs if pair]
    assert len(set(names)) == len(names)
    return {pair[1]: pair[2] for pair in pairs if pair}


def newer_than_here(words: str) -> bool:
    """Whether a row says that this torch does not have the name: ``after torch 2.11: ...``."""
    after = re.match(r"after torch (\d+)\.(\d+): ", words)
    here = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return after is not None and here <= (int(after[1]), int(after[2]))


TORCH = {
    "torch fully_shard": ("moving/fsdp2.md", parameters(fsdp.fully_shard)),
    "torch MixedPrecisionPolicy": ("moving/fsdp2.md", fields(fsdp.MixedPrecisionPolicy)),
    "torch CPUOffloadPolicy": ("moving/fsdp2.md", fields(fsdp.CPUOffloadPolicy)),
    "torch FSDPModule": ("moving/fsdp2.md", methods(fsdp.FSDPModule)),
    "torch DistributedDataParallel": ("moving/ddp.md", parameters(DistributedDataParallel.__init__)),
}


@pytest.mark.parametrize("table", TORCH)
def test_what_torch_has(table: str) -> None:
    """Tables about torch have a row for everything in the installed version.

    A newer version may have more than its table. This test then says so.
    """
    page, there = TORCH[table]
    told = rows(page, table)
    assert not set(there) - told.keys(), "without a row"
    missing = {name for name in told.keys() - set(there) if not newer_than_here(told[name])}
    assert not missing, "there is no such thing, and the row does not say 'after torch ...: '"


def test_every_argument_of_ours() -> None:
    assert sorted(rows("moving/megatron_fsdp.md", "fully_shard_model")) == sorted(parameters(fully_shard_model))


def test_arguments_as_an_object_have_the_same_defaults_and_types() -> None:
    """:class:`Arguments` repeats the signature of ``fully_shard_model``, and checks values by its annotations."""
    signature = inspect.signature(fully_shard_model).parameters
    given = {name: (of.annotation, of.default) for name, of in signature.items() if name != "module"}
    fields = dataclasses.fields(Arguments)
    assert given == {of.name: (of.type, getattr(Arguments(), of.name)) for of in fields}


def test_keys_of_deepspeed() -> None:
    """The last column says what the code does with a key."""
    assert sorted(ZERO_KEYS) == sorted(DEEPSPEED)
    for table, keys in (("deepspeed", ZERO_KEYS), ("deepspeed file", KEYS)):
        told = {name: words.rpartition(" | ")[2] for name, words in rows("moving/deepspeed.md", table).items()}
        assert told == {name: key.kind for name, key in keys.items()}


def test_members_of_megatron_fsdp() -> None:
    """The table names what the class has, and says of all else that there is none."""
    text = (DOCS / "moving" / "megatron_fsdp.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- members: MegatronFSDP -->\n(.*?)<!-- end -->", text, re.DOTALL)
    assert found is not None
    lines = [line.strip("| ").split(" | ", 1) for line in found[1].splitlines() if line.startswith("| `")]
    told = {name: here for names, here in lines for name in re.findall(r"`(\w+)`", names)}
    attributes = {"module", "dist_index"}  # set by the constructor
    wrong = [
        name
        for name, here in told.items()
        if (hasattr(MegatronFSDP, name) or name in attributes) == here.startswith("none")
    ]
    assert not wrong
    assert len(told) > 30


def test_methods_of_fsdp2_that_are_refused() -> None:
    """The second column of the table about FSDPModule: those that say so are refused, all others are methods here."""
    told = {
        name: re.sub(r"^after torch [\d.]+: ", "", words)
        for name, words in rows("moving/fsdp2.md", "torch FSDPModule").items()
    }
    assert {name for name, words in told.items() if words.startswith("refused")} == set(REFUSED)
    assert not told.keys() - vars(fsdp2.FSDPModule).keys()


def test_every_option_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MFSDP_VERIFY", raising=False)
    told = rows("options.md", "options", marker="table")
    policy = {field.name: field.default for field in dataclasses.fields(SchedulePolicy)}
    assert set(told) == CompileOptions.names()
    options = CompileOptions.of(None, None)
    defaults = policy | {name: getattr(options, name) for name in ("inner", "report", "float32_gradients", "verify")}
    for name, default in defaults.items():
        shown = told[name].split(" | ")[0]
        assert shown == "none" if default is None else eval(shown.strip("`")) == default, name


def test_every_environment_variable() -> None:
    """Every environment variable that the package reads is in the docs."""
    sources = [
        file for package in ("mfsdp_compile", "passes", "runtime") for file in (DOCS.parent / package).rglob("*.py")
    ]
    used = {name for file in sources for name in re.findall(r'"(MFSDP_[A-Z_]+)"', file.read_text(encoding="utf-8"))}
    told = re.findall(r"^\| `(MFSDP_[A-Z_]+)` \|", (DOCS / "options.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert used == set(told)


def test_every_command() -> None:
    text = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `mfsdp ([a-z-]+(?: [a-z-]+)?)", text, re.MULTILINE))
    assert told == set(commands())


def commands() -> Iterator[str]:
    """Yield the commands of the command line, and their subcommands."""
    for name, command in cli.COMMANDS.items():
        parser = argparse.ArgumentParser()
        command.add(parser)
        inner = subparsers(parser)
        yield from (f"{name} {each}" for each in inner) if inner else [name]


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def test_the_rules_of_the_verifier() -> None:
    described = [
        (rule.number, rule.name, " ".join((rule.check.__doc__ or "").split("\n\n")[0].split())) for rule in RULES
    ]
    check_table(DOCS / "concepts.md", "rules", ("rule", "name", "what holds"), described)


BEGIN, TABLE, END = "<!-- table: one -->\n", "| a |\n| --- |\n| 1 |\n", "<!-- end -->\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TABLE + END, "has 0 tables 'one'"),
        (BEGIN.replace("one", "two") + TABLE + END, "has 0 tables 'one'"),
        (BEGIN + TABLE, "has 0 tables 'one'"),
        (BEGIN + TABLE + "<!-- ned -->\n" + BEGIN.replace("one", "two") + TABLE + END, "does not end before another"),
        ((BEGIN + TABLE + END) * 2, "has 2 tables 'one'"),
        (BEGIN + TABLE.replace("1", "2") + END, "has another table 'one'"),
    ],
)
def test_tables_that_are_missing_or_do_not_end(text: str, message: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(BEGIN + TABLE + END)
    check_table(page, "one", ["a"], [[1]])
    page.write_text(text)
    with pytest.raises(AssertionError, match=message):
        check_table(page, "one", ["a"], [[1]])
