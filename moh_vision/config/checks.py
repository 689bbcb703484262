"""What the sections of a configuration share."""

from __future__ import annotations

import math


def check(name: str, value, ok: bool, allowed: str) -> None:
    finite = not isinstance(value, float) or math.isfinite(value)
    if not ok or not finite:
        raise ValueError(f"{name} {value!r} is out of range: {allowed}")


def check_seed(seed: int) -> None:
    check("seed", seed, 0 <= seed < 2**63, "0 to 2**63 - 1")


def plain(value):
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value
