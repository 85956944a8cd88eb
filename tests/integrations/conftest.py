"""What several tests of integrations need."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Yield the list of lines that :mod:`mfsdp_compile.megatron` logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("mfsdp_compile.megatron")
    log.addHandler(handler)
    yield lines
    log.removeHandler(handler)
