"""Mutants of the product: changes that break it. Some test must notice each of them.

``make mutants`` applies them one by one, in a copy, and runs the tests that should fail. See docs/mutants.md.
"""

from .checkpoint_mutants import CHECKPOINT
from .fp8_mutants import FP8
from .more_runtime_mutants import MORE_RUNTIME
from .passes_mutants import PASSES_MUTANTS
from .precision_mutants import PRECISION
from .runtime_mutants import RUNTIME
from .te_mutants import TRANSFORMER_ENGINE

MUTANTS = (*RUNTIME, *MORE_RUNTIME, *PASSES_MUTANTS, *CHECKPOINT, *FP8, *PRECISION, *TRANSFORMER_ENGINE)
