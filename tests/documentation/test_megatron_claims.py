"""The table of docs/megatron.md about Megatron's documents is whole, and what it names exists.

The documents are the pages "Megatron FSDP" of Megatron Bridge (an older one, with examples, and a newer overview), the
README of megatron-fsdp, the "Megatron-FSDP User Guide" of Megatron-LM, and the page "Megatron FSDP" of Megatron Core.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from doc_tables import DOCS, rows_of
from documents import check_command

from mfsdp_compile.megatron import add_megatron_fsdp_arguments

TESTS = Path(__file__).resolve().parents[1]
DOCUMENTS = {"Megatron Bridge", "megatron-fsdp README", "User Guide", "Megatron Bridge, overview", "Megatron Core"}

WRITTEN, OTHER, REFUSED, ABSENT = "works as written", "works, other name or form", "refused by name", "absent"


class Claim(NamedTuple):
    """A row of the table.

    Args:
        document: One of :data:`DOCUMENTS`.
        words: The document's words, shortened.
        verdict: One of the four above.
        here: What holds here; required unless the verdict is :data:`WRITTEN`. With :data:`ABSENT`, why it cannot be.
        tests: Tests that show it, ``file::function``. Empty with :data:`ABSENT`.
    """

    document: str
    words: str
    verdict: str
    here: str
    tests: list[str]


def claims() -> list[Claim]:
    rows = rows_of(DOCS / "megatron.md", "claims")
    return [
        Claim(document, words, *verdict.partition(": ")[::2], re.findall("`(.+?)`", tests))
        for document, words, verdict, tests in rows
    ]


CLAIMS = claims()

_FLAGS = """
--calculate-per-token-loss --ckpt-format --data-parallel-sharding-strategy --dump-param-to-param-group-map
--fsdp-double-buffer --grad-reduce-in-bf16 --init-model-with-meta-device --no-gradient-accumulation-fusion
--save-interval --use-distributed-optimizer --use-megatron-fsdp --use-nccl-ub
"""
_COMMANDS = [
    "mfsdp convert IN OUT",
    "mfsdp convert IN OUT --to torch_dist",
    "mfsdp convert-torch-dist-to-fsdp-dtensor --swiglu IN OUT --param-to-param-group-map-json FILE",
    "mfsdp plan --help",
    "mfsdp print-torch-dcp-in-json DIR",
]
_NAMES = """
MegatronFSDP.finish_grad_sync MegatronFSDP.is_last_microbatch MegatronFSDP.manual_buffer_registration
MegatronFSDP.microbatch_count MegatronFSDP.param_and_grad_buffer MegatronFSDP.scale_gradients MixedPrecisionPolicy
backend.compile.mfsdp checkpoint.Checkpoints explain fsdp2.fully_shard fully_shard_model fully_shard_optimizer
integrations.transformers.MfsdpTrainer megatron.Adjustment megatron.CheckpointConfig
megatron.CheckpointConfig.save_interval megatron.ConfigContainer.unread megatron.DistributedDataParallelConfig
megatron.DistributedDataParallelConfig.average_in_collective
megatron.DistributedDataParallelConfig.reuse_grad_buf_for_mxfp8_param_ag
megatron.DistributedDataParallelConfig.use_megatron_fsdp megatron.DistributedInitConfig
megatron.DistributedInitConfig.use_tp_pp_dp_mapping megatron.FullyShardedDataParallel
megatron.FullyShardedDataParallel.sharded_state_dict megatron.GPTModelProvider megatron.OptimizerConfig
megatron.OptimizerConfig.reuse_grad_buf_for_mxfp8_param_ag megatron.SchedulerConfig megatron.TrainingConfig
megatron.TransformerConfig.gradient_accumulation_fusion megatron.TransformerConfig.tensor_model_parallel_size
megatron.dump_param_to_param_group_map megatron.validate
runtime.model.sharded_model.ShardedModel.manual_buffer_registration
uneven_dtensor.preprocess_state_dict_for_uneven_dtensor
"""
_PARAMETERS = {
    "MegatronFSDP": "sync_model_each_microbatch",
    "fully_shard": "module optimizer",
    "fully_shard_model": (
        "buffer_allocator calculate_per_token_loss communication device device_mesh disable_symmetric_registration "
        "dp_outer_dim dp_shard_dim enable_fine_grained_param_gather expt_device_mesh "
        "fsdp_db_use_persist_buf_on_alloc_fail fsdp_double_buffer fsdp_manual_registration fsdp_unit_modules "
        "grad_reduce_in_fp32 hybrid_fsdp_group init_fn init_model_with_meta_device is_expert keep_fp8_transpose_cache "
        "maxpool_double_buffer mixed_precision_policy nccl_ub offload_policy outer_dp_sharding_strategy "
        "overlap_grad_reduce overlap_param_gather preproc_state_dict_for_dcp_ckpt preserve_fp32_weights "
        "sync_model_each_microbatch tp_dim zero_dp_strategy"
    ),
    "fully_shard_optimizer": "optimizer preproc_state_dict_for_dcp_ckpt",
    "megatron.ConfigContainer": "checkpoint ddp dist",
    "megatron.DistributedOptimizer": "dump_param_to_param_group_map per_model_buffers",
    "megatron.FullyShardedDataParallel": "fsdp_unit_modules",
    "megatron.allocator_arguments": "name",
}
NAMES = [
    *_FLAGS.split(),
    *_COMMANDS,
    *(f"mfsdp_compile.{name}" for name in _NAMES.split()),
    *(f"mfsdp_compile.{name}({each})" for name, of in _PARAMETERS.items() for each in of.split()),
]
"""What the rows say exists."""


@functools.cache
def functions(file: Path) -> set[str]:
    """Return the names of a file's test functions, without importing it."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@functools.cache
def flags() -> set[str]:
    parser = add_megatron_fsdp_arguments(argparse.ArgumentParser())
    return {flag for action in parser._actions for flag in action.option_strings}


def check_name(name: str) -> None:
    """Raise AssertionError unless a name of a row exists."""
    if name.startswith("--"):
        assert name in flags(), f"there is no flag {name}"
    elif name.startswith("mfsdp "):
        if not name.endswith("--help"):
            check_command(shlex.split(name))
    else:
        found = re.fullmatch(r"([\w.]+)(?:\((\w+)\))?", name)
        assert found is not None, f"{name!r} is no name"
        value = looked_up(found[1])
        if found[2] is not None:
            assert found[2] in inspect.signature(value).parameters, f"{found[1]} takes no {found[2]}"


def looked_up(path: str) -> object:
    """Return what a dotted path names: a module, or an attribute of one."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            assert hasattr(value, part), f"{path}: there is no {part}"
            value = getattr(value, part)
        return value
    raise AssertionError(f"{path} cannot be imported")


def test_every_row_is_whole() -> None:
    assert {claim.document for claim in CLAIMS} == DOCUMENTS
    assert len({(claim.document, claim.words) for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.verdict in (WRITTEN, OTHER, REFUSED, ABSENT), claim
        assert claim.here or claim.verdict == WRITTEN, f"{claim.words}: why?"
        assert bool(claim.tests) != (claim.verdict == ABSENT), (
            f"{claim.words}: cite a test, unless the verdict is {ABSENT!r}"
        )


def test_every_test_is_there() -> None:
    absent = []
    for claim in CLAIMS:
        for test in claim.tests:
            file, _, function = test.partition("::")
            if not (TESTS / file).is_file() or function not in functions(TESTS / file):
                absent.append(f"{claim.words}: {test}")
    assert not absent, "\n".join(absent)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there(name: str) -> None:
    check_name(name)


def test_code_in_the_words_of_working_rows_has_a_name() -> None:
    """Flags that a row quotes are accepted by the parser, whether or not the row names them."""
    quoted = {
        flag
        for claim in CLAIMS
        if claim.verdict not in (ABSENT, REFUSED)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", claim.words)
    }
    of_commands = {"--swiglu", "--param-to-param-group-map-json"}  # checked with the command
    assert quoted - of_commands <= flags()
    assert of_commands <= quoted


@pytest.mark.parametrize(
    "name",
    [
        "--no-such-flag",
        "mfsdp no-such-command",
        "mfsdp_compile.no_such_name",
        "mfsdp_compile.fully_shard_model(no_such_argument)",
        "no.such.module",
    ],
)
def test_names_that_are_not_there_are_noticed(name: str) -> None:
    with pytest.raises(AssertionError):
        check_name(name)
