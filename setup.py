"""Finds the packages; everything else about the project is in pyproject.toml.

``passes/`` and ``runtime/`` lie at the top level and are imported as ``mfsdp_compile.passes`` and
``mfsdp_compile.runtime``, so that nothing called "passes" lands in anybody's site-packages. pyproject.toml alone can
only list such packages, one by one.
"""

from setuptools import find_packages, setup

mapped = ("passes", "runtime")
setup(
    packages=[
        *find_packages(include=["mfsdp_compile", "mfsdp_compile.*"]),
        *(
            f"mfsdp_compile.{name}"
            for name in find_packages(include=[f"{top}{sub}" for top in mapped for sub in ("", ".*")])
        ),
    ],
    package_dir={f"mfsdp_compile.{name}": name for name in mapped},
)
