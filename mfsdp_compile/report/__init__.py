"""Reports of a training step, simulated and measured: for terminals, for browsers, and as a trace for Perfetto."""

from ..quantities import bytes_text, flops_text, percent_text, seconds_text
from .exposures import exposure_text
from .html import to_html
from .perfetto import to_chrome_trace
from .step_report import PassRow, StepReport, Table, UnitTime, headline, peak_text, tables
from .text import to_text
from .write_files import write

__all__ = [
    "PassRow",
    "StepReport",
    "Table",
    "UnitTime",
    "bytes_text",
    "exposure_text",
    "flops_text",
    "headline",
    "peak_text",
    "percent_text",
    "seconds_text",
    "tables",
    "to_chrome_trace",
    "to_html",
    "to_text",
    "write",
]
