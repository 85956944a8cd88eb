"""Tables in docs/parallelism.md are what the tests of communication assert."""

from __future__ import annotations

import test_context_parallel
import test_pipeline
import test_tensor_parallel
from doc_tables import DOCS, check_table


def test_collectives() -> None:
    def of(count: int, microbatches: int) -> str:
        """Write a count as a multiple of ``m``, the number of microbatches, if it is one."""
        return str(count) if count % microbatches else {1: "m"}.get(count // microbatches, f"{count // microbatches} m")

    header = ("mesh", "", "gathers", "reduce-scatters", "gathers of keys and values", "their reduce-scatters")
    rows: list[tuple[object, ...]] = []
    for name, counts in test_context_parallel.COUNTS.items():
        rows.append(("2 dp x 2 cp", name, *(of(count, 1) for count in counts)))
    m = 1009  # a prime that no count equals
    for name, (_, pipeline) in test_pipeline.COUNTS.items():
        gathers, kept, reductions = pipeline(m)
        rows.append(("2 pp x 2 dp", name, of(gathers or kept, m), of(reductions, m), "", ""))
    rows.append(
        ("2 pp x 2 dp x 2 cp", "as it is", *(of(count, m) for count in test_context_parallel.pipeline_counts(m)))
    )
    check_table(DOCS / "parallelism.md", "collectives", header, rows)


def test_collectives_of_tensor_parallel_ranks() -> None:
    header = ("2 dp x 2 tp", "", "all-gathers", "reduce-scatters", "all-reduces")
    rows = [
        (name, where, *(count or "" for count in counts))
        for name, both in test_tensor_parallel.COUNTS.items()
        for where, counts in zip(("each layer", "embedding, norm and head"), both, strict=True)
    ]
    check_table(DOCS / "tensor_parallel.md", "tensor parallel", header, rows)
