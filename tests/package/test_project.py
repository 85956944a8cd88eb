"""What others meet first: workflows, templates, the image, the version; they name commands and versions that exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())
PROJECT = [
    *WORKFLOWS,
    *(ROOT / ".github").rglob("*.md"),
    *(ROOT / ".github" / "ISSUE_TEMPLATE").iterdir(),
    *(
        ROOT / name
        for name in (
            "CITATION.cff",
            "Dockerfile",
            ".dockerignore",
            ".pre-commit-config.yaml",
            "RELEASING.md",
            "SECURITY.md",
        )
    ),
]
"""Files that are for a forge and its visitors."""
YAML = sorted(
    {
        ROOT / "CITATION.cff",
        *(
            path
            for pattern in ("*.yml", "*.yaml", ".*.yaml", ".github/**/*.yml", "mfsdp_compile/**/*.yaml")
            for path in ROOT.glob(pattern)
        ),
    }
)


def requirement(name: str) -> Requirement:
    """Return what pyproject.toml says of a package; where it says it twice, first."""
    return Requirement(re.findall(rf'"({name}[<>=].*?)"', PYPROJECT)[0])


def version() -> str:
    (found,) = re.findall(r'^version = "(.*)"$', PYPROJECT, re.MULTILINE)
    return found


def loaded(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def steps() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the commands of workflows: the workflow's name, the job, and the command."""
    for path in WORKFLOWS:
        (workflow,) = loaded(path)
        for job in workflow["jobs"].values():
            for step in job["steps"]:
                assert ("run" in step) is not ("uses" in step)
                if "run" in step:
                    yield path.name, job, step["run"]


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in YAML])
def test_yaml_can_be_read(path: Path) -> None:
    assert all(isinstance(document, dict) for document in loaded(path))


def test_yaml_files_are_found() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in YAML}
    assert {"mkdocs.yml", ".pre-commit-config.yaml", ".github/workflows/checks.yml"} <= names
    assert {".github/ISSUE_TEMPLATE/bug.yml", "mfsdp_compile/examples/cluster/kubernetes.yaml"} <= names


def make_targets(command: str) -> list[str]:
    """Return the targets of a make command. Its variables must exist too."""
    program, *words = shlex.split(re.sub(r"\$\{\{.*?\}\}", "X", command))
    assert program == "make", f"workflows call make, not {command!r}"
    for word in words:
        name, is_variable, _ = word.partition("=")
        assert re.search(rf"^{name} *\?=" if is_variable else rf"^{name}:", MAKEFILE, re.MULTILINE), command
    return [word for word in words if "=" not in word]


def test_workflows_call_targets_that_exist() -> None:
    called = [target for _, _, command in steps() for target in make_targets(command)]
    tests = re.findall(r"^test: (.*)\n\t\$\(PYTEST\) -m \"not long\"$", MAKEFILE, re.MULTILINE)
    assert tests == ["lint types"]  # with the three selections, a workflow runs what make test does
    assert {*tests[0].split(), "fast", "slow", "processes", "wheel", "docs", "gate"} == set(called)


def test_the_matrix_has_the_versions_that_are_supported() -> None:
    (matrix,) = {tuple(job["strategy"]["matrix"]["torch"]) for _, job, _ in steps() if "strategy" in job}
    supported = requirement("torch").specifier
    assert all(supported.contains(each) for each in matrix)
    minors = sorted(Version(each).release[:2] for each in matrix)
    assert not supported.contains(f"{minors[0][0]}.{minors[0][1] - 1}.0")  # the oldest
    assert not supported.contains(f"{minors[-1][0]}.{minors[-1][1] + 1}.0")  # and the newest
    (default,) = re.findall(r"^TORCH +\?= torch==(\S+)$", MAKEFILE, re.MULTILINE)
    assert default in matrix
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^ARG TORCH=torch==(\S+)$", dockerfile, re.MULTILINE) == [default]
    tested = ", ".join(f"{major}.{minor}" for major, minor in minors[:-1]) + " and {}.{}".format(*minors[-1])
    for page in ("README.md", "CONTRIBUTING.md"):
        assert f"torch {tested}" in " ".join((ROOT / page).read_text(encoding="utf-8").split()), page


def test_the_image_runs_the_commands_of_the_readme() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"make {target}" in dockerfile
        assert re.search(rf"^make {target} ", readme, re.MULTILINE)
    for command in re.findall(r"^RUN (make .*)$", dockerfile, re.MULTILINE):
        assert make_targets(command) == ["venv"]
    arguments = re.findall(r"^ARG (\w+)=", dockerfile, re.MULTILINE)
    assert arguments == ["BASE", "TORCH", "PIP_EXTRA_INDEX_URL"]


def test_commits_are_checked_by_the_same_ruff() -> None:
    (config,) = loaded(ROOT / ".pre-commit-config.yaml")
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    commands = [hook["entry"].partition(" --")[0] for hook in hooks]
    linted = re.findall(r"^\t\$\(BIN\)/(ruff \w+) ", MAKEFILE, re.MULTILINE)
    assert commands == linted == ["ruff check", "ruff format"]
    assert all(hook["additional_dependencies"] == [str(requirement("ruff"))] for hook in hooks)


def test_a_bug_comes_with_what_doctor_prints() -> None:
    (bug,) = loaded(ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml")
    required = [
        field["attributes"]["label"] for field in bug["body"] if field.get("validations", {}).get("required") is True
    ]
    assert any("mfsdp doctor" in label for label in required)


def test_addresses_of_the_project_are_in_one_place() -> None:
    """They are placeholders. Everything else speaks of the repository, and no file names an index or a host."""
    urls = re.search(r"^\[project\.urls\]\n((?:.+\n)+)", PYPROJECT, re.MULTILINE)
    assert urls is not None
    (host,) = set(re.findall(r'"https://([^/"]+)', urls[1]))
    texts = {path: path.read_text(encoding="utf-8") for path in PROJECT}
    texts |= {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}
    texts |= {path: path.read_text(encoding="utf-8") for path in ROOT.glob("*.md")}
    assert not [path for path, text in texts.items() if host in text]
    assert not [path for path in PROJECT if "://" in texts[path]]
    images = re.findall(r"^(?:ARG BASE=|FROM )(\S+)$", texts[ROOT / "Dockerfile"], re.MULTILINE)
    assert images == ["python:3.12-slim", "${BASE}"]


def test_one_version_is_said_everywhere() -> None:
    (citation,) = loaded(ROOT / "CITATION.cff")
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    status = re.search(r"^\*\*Status\*\*: (\S+),", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heading is not None
    assert status is not None
    assert version() == citation["version"] == heading[1] == status[1]
    assert citation["license"] == re.findall(r'^license = "(.*)"$', PYPROJECT, re.MULTILINE)[0]


def test_the_readme_leads_to_every_example() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    examples = ROOT / "mfsdp_compile" / "examples"
    programs = {path.name for path in examples.glob("*.py")} - {
        "__init__.py",
        "job_config.py",
    }  # what a program imports
    assert programs == set(re.findall(r"\]\(mfsdp_compile/examples/(\w+\.py)\)", readme))
    assert "](mfsdp_compile/examples/cluster)" in readme


def test_links_of_project_files_lead_somewhere() -> None:
    for path in (path for path in [*PROJECT, ROOT / "README.md", ROOT / "CONTRIBUTING.md"] if path.suffix == ".md"):
        for target in re.findall(r"\]\(([^)#:\s]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name} leads to {target}"


# -- the gate ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def common() -> ModuleType:
    """Return ``benchmarks/common.py``."""
    spec = importlib.util.spec_from_file_location("benchmarks_common", ROOT / "benchmarks" / "common.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_gate_is_closed_above_a_bound_and_without_a_measurement(common: ModuleType) -> None:
    results = {"mfsdp compiled": {"ratio": 0.8}, "mfsdp eager": {"ratio": 1.2}, "DDP compiled": {"skipped": "no"}}
    assert common.above(results, {"mfsdp compiled": 0.8, "mfsdp eager": 1.2}) == []
    missed = common.above(results, {"mfsdp compiled": 0.79, "mfsdp eager": 1.2, "DDP compiled": 2, "FSDP2 eager": 2})
    assert [line.partition(":")[0] for line in missed] == ["mfsdp compiled", "DDP compiled", "FSDP2 eager"]
    assert "0.800 is above 0.79" in missed[0]


def test_the_gate_asks_for_what_it_measures(common: ModuleType) -> None:
    """Each bound is of a system that the command measures, beside the baseline that the ratio is to."""
    (gate,) = re.findall(r"^gate: .*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    commands = [shlex.split(line) for line in gate.replace("\\\n", " ").splitlines()]
    assert len(commands) == 2
    for program, *words in (command[1:] for command in commands):
        baseline = re.findall(r'^BASELINE = "(.*)"$', (ROOT / program).read_text(encoding="utf-8"), re.MULTILINE)
        at = words.index("--at-most")
        measured, bounds = words[words.index("--systems") + 1 : at], words[at + 1 :]
        named = [common._bound(bound) for bound in bounds]
        assert {*dict(named), *baseline} == set(measured)
        assert all(0 < bound <= 1.1 for _, bound in named)


@pytest.mark.long
def test_a_benchmark_ends_with_an_error_above_a_bound() -> None:
    command = [sys.executable, "benchmarks/overhead.py", "--rounds", "2", "--layers", "1", "--systems", "FSDP2 eager"]
    command += ["mfsdp eager", "--at-most"]
    for bound, status in (("0.0001", 1), ("1000", 0)):
        done = subprocess.run(
            [*command, f"mfsdp eager={bound}"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == status, done.stderr
        assert ("is above 0.0001" in done.stderr) is (status == 1)
