"""Triton's interpreter runs kernels on a CPU: in a process of its own, since it is chosen when a kernel is defined."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_MARKS = (
    pytest.mark.skipif(INTERPRETED, reason="runs the interpreter"),
    pytest.mark.skipif(
        tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4),
        reason="Triton's interpreter takes arrays of one element as ints",
    ),
)


def starts_the_interpreter(test: pytest.Function) -> pytest.Function:
    """For the test that calls `run_interpreted`: skipped where that cannot be."""
    for mark in _MARKS:
        test = mark(test)
    return test


def run_interpreted(file: str, keyword: str) -> None:
    """Run the tests of `file` that `keyword` selects, with the interpreter on."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", keyword]
    result = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
