"""The acceptance benchmark's table."""

from __future__ import annotations

import acceptance


def test_the_mean_is_over_the_public_sets() -> None:
    row = {"chain": 1.0, "15": 2.0, "63": 3.005, "255": 4.0}
    assert "| held out | 1.00 | 2.00 | 3.00 | 4.00 |" in acceptance.markdown({"held out": row})
