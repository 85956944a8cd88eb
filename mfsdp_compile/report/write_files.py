"""Writing the files of a report."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from mfsdp_compile.runtime.untrusted_files import new_file

from .html import to_html
from .perfetto import to_chrome_trace
from .step_report import StepReport
from .text import to_text


def write(report: StepReport, folder: Path | str, name: str) -> dict[str, Path]:
    """Write ``name.html``, ``name.txt`` and ``name.trace.json`` to a folder, which is created if necessary.

    Each file is written completely or not at all. The files of an earlier report stay until all new ones are written.

    Returns:
        The paths, by ``"html"``, ``"text"`` and ``"trace"``.

    Raises:
        ValueError: If ``name`` is not a file name.
        OSError: If the files cannot be written. The message names the folder.
    """
    if not name or Path(name).name != name:
        raise ValueError(f"name must be a prefix of file names, without a folder; got {name!r}")
    folder = Path(folder)
    texts = {
        "html": ("html", to_html(report)),
        "text": ("txt", to_text(report)),
        "trace": ("trace.json", json.dumps(to_chrome_trace(report.timeline), allow_nan=False)),
    }
    paths = {form: folder / f"{name}.{end}" for form, (end, _) in texts.items()}
    try:
        with contextlib.ExitStack() as replaced:
            for form, (_, text) in texts.items():
                file = replaced.enter_context(new_file(folder, paths[form].name))
                file.write(text.encode())
                file.flush()  # a full disk is noticed before any file is replaced
    except OSError as error:
        raise OSError(
            error.errno,
            f"the report {name!r} cannot be written to {folder}: {error.strerror or error}. Choose a writable folder "
            "on a disk with free space",
        ) from error
    return paths
