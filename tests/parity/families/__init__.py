"""Tiny models of every family, one file each with a tuple `CASES`; together they cover the family's options.

Not here: what is done with them (../test_family_goldens.py, ../test_family_live.py, tests/families/).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from ..family_cases import FamilyCase


def all_cases() -> Iterator[FamilyCase]:
    """The cases of every file here, in order of name."""
    for module in pkgutil.iter_modules(__path__):
        yield from importlib.import_module(f"{__name__}.{module.name}").CASES
