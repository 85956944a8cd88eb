"""Files in folders that others may write to: what others have put there is neither written through nor waited for."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mfsdp_compile.runtime.schedule.file import MOST_BYTES, ScheduleText
from mfsdp_compile.runtime.schedule.phase import Phase
from mfsdp_compile.runtime.untrusted_files import FileRefused, new_file, write_text


def test_links_are_replaced_and_not_followed(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("precious")
    (folder / "reports").mkdir(parents=True)
    (folder / "soft").symlink_to(victim)
    (folder / "hard").hardlink_to(victim)
    (folder / "nowhere").symlink_to(tmp_path / "missing")
    (folder / "loop").symlink_to(folder / "loop")
    for name in ("soft", "hard", "nowhere", "loop", "new", "reports/deep/new"):
        with new_file(folder, name) as file:
            file.write(b"content")
        assert not (folder / name).is_symlink()
        assert (folder / name).read_bytes() == b"content"
    assert victim.read_text() == "precious"
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    "name", ["link/file", "reports/link/file", "file/below", "pipe", "device", "folder", "../out", "/x"]
)
def test_what_is_no_place_for_a_file_is_refused(name: str, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (folder / "reports").mkdir(parents=True)
    (folder / "link").symlink_to(elsewhere)
    (folder / "reports" / "link").symlink_to(elsewhere)
    (folder / "file").write_text("")
    (folder / "folder").mkdir()
    (folder / "device").symlink_to("/dev/null")
    os.mkfifo(folder / "pipe")
    with pytest.raises(FileRefused), new_file(folder, name) as file:
        file.write(b"content")
    assert not list(elsewhere.iterdir())
    assert {path.name for path in folder.iterdir()} == {"reports", "link", "file", "folder", "device", "pipe"}


def test_a_file_is_written_as_a_whole_or_stays(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "before")

    def fail() -> None:
        with new_file(tmp_path, "file") as file:
            file.write(b"after")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "before"


# -- schedules --------------------------------------------------------------------------------------------------------


def test_schedules_are_regular_files_of_limited_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"\n" * (MOST_BYTES + 1))
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name, why in {"pipe": "not a regular file", "large": "more than the", "bytes": "not UTF-8"}.items():
        with pytest.raises(ValueError, match=f"cannot be read: .*{why}"):
            ScheduleText.load(tmp_path / name)
    with pytest.raises(ValueError, match="is no start or wait") as caught:
        ScheduleText.parse("x" * 1_000_000, "long")
    assert len(str(caught.value)) < 500


def test_long_schedules_are_read_in_linear_time() -> None:
    def seconds(count: int) -> float:
        names = [f"layers.{number}" for number in range(count)]
        lines = ["[forward]", *(f"gather {name}" for name in names), *(f"wait {name}" for name in names), "[backward]"]
        lines += [*(f"reduce {name}" for name in names), *(f"await {name}" for name in names)]
        begun = time.process_time()
        decided = ScheduleText.parse("\n".join(lines), "text").decisions(names, names, True)
        assert len(decided.gathers[Phase.FORWARD]) == len(decided.reductions) == count
        return time.process_time() - begun

    assert seconds(8000) < 30 * seconds(1000)  # quadratic: 64 times
