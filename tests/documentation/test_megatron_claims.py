"""The table of docs/megatron.md about Megatron's documents is made of :mod:`megatron_claims`; what it names exists."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import re
import shlex
from pathlib import Path

import pytest
from doc_tables import DOCS, check_table
from documents import check_command
from megatron_claims import ABSENT, CLAIMS, DOCUMENTS, REFUSED, VERDICTS, WRITTEN, Claim

from mfsdp_compile.megatron import add_megatron_fsdp_arguments

TESTS = Path(__file__).resolve().parents[1]


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


def test_the_table() -> None:
    rows = [
        (
            claim.document,
            claim.words.replace("|", "\\|"),
            f"{claim.verdict}: {claim.here}" if claim.here else claim.verdict,
            cell_of(claim),
        )
        for claim in CLAIMS
    ]
    check_table(DOCS / "megatron.md", "claims", ("document", "its words", "here", "tests"), rows)


def cell_of(claim: Claim) -> str:
    return ", ".join(f"`{test}`" for test in claim.tests.split())


def test_every_row_is_whole() -> None:
    assert {claim.document for claim in CLAIMS} == {*DOCUMENTS}
    assert len({(claim.document, claim.words) for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.verdict in VERDICTS, claim
        assert claim.here or claim.verdict == WRITTEN, f"{claim.words}: why?"
        assert bool(claim.tests) != (claim.verdict == ABSENT), (
            f"{claim.words}: cite a test, unless the verdict is {ABSENT!r}"
        )


def test_every_test_is_there() -> None:
    absent = []
    for claim in CLAIMS:
        for test in claim.tests.split():
            file, _, function = test.partition("::")
            if not (TESTS / file).is_file() or function not in functions(TESTS / file):
                absent.append(f"{claim.words}: {test}")
    assert not absent, "\n".join(absent)


def test_every_name_is_there() -> None:
    wrong = []
    for claim in CLAIMS:
        for name in filter(None, claim.names.split(", ")):
            try:
                check_name(name)
            except AssertionError as error:
                wrong.append(f"{claim.words}: {error}")
    assert not wrong, "\n".join(wrong)


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
