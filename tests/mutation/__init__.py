"""Mutants of the product: changes that break it. Some test must notice each of them.

``make mutants`` applies them one by one, in a copy, and runs the tests that should fail. See docs/mutants.md.
"""

from pathlib import Path

from .mutant import read

MUTANTS = tuple(mutant for path in sorted(Path(__file__).parent.glob("*.diff")) for mutant in read(path))
