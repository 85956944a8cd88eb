"""How far predictions were from published training runs, and how much memory plans leave free because of that.

The numbers sum up the first table of ``benchmarks/published.py``, the runs whose sources state their settings
(``docs/foresight.md``, "Against published figures"). A test compares them with it.

What torch's allocator reserves is more than what tensors take: fragmentation, rounding, and what a prediction does not
see. In each published run with a memory figure, the prediction was a fraction ``e`` below what had been reserved. Had
the device had just the reserved memory ``R``, the prediction would have been ``(1 - e) R``. So of a device with ``M``
bytes,

- a plan ``fits`` if it takes at most ``(1 - MOST_RESERVED) M``: it would have, with the error of every published run;
- it ``may not fit`` up to ``(1 - LEAST_RESERVED) M``: it depends on the run;
- it ``does not fit`` above that: it would not have, in any of them.

The CUDA context and NCCL's buffers, which the allocator does not see, have to be in ``LEAST_RESERVED`` too.
"""

from __future__ import annotations

LEAST_RESERVED, MOST_RESERVED = 0.040, 0.336
"""Least and most of what torch's allocator had reserved by which predicted memory was below it."""
TOKENS_OFF = (-0.137, 0.263)
"""Errors of predicted tokens per second, from the lowest to the highest, of runs that nothing was fitted to."""
TOKENS_OFF_MEDIAN = 0.047
"""Median of the absolute values of these errors."""
