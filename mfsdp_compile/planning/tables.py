"""What commands print: text and tables that are readable in a terminal, and in whole lines everywhere else."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def plain_console() -> Console:
    """Return a console that wraps text only in a terminal. Programs such as ``grep`` read whole lines."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def table_of(*names: str) -> Table:
    """Return an empty table with these columns, numbers on the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        in_words = name in ("values for backward", "sharding", "")
        table.add_column(name, justify="left" if in_words else "right", no_wrap=True)
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table in full width, however narrow the terminal is."""
    width = console.width
    console.width = max(width, Measurement.get(console, console.options.update_width(1000), table).maximum)
    console.print(table)
    console.width = width
