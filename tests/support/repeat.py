"""Random tests that can be repeated."""

import os
import random

SEED = int(os.environ.get("MOH_VISION_SEED", "0"))


def cases(count: int, what: str) -> random.Random:
    """The random numbers of a test of `count` cases; pytest shows the line when it fails."""
    print(f"{what}: N {count}, MOH_VISION_SEED={SEED}")
    return random.Random(SEED)
