"""Random tests that can be repeated with the same random numbers."""

import os
import random

SEED = int(os.environ.get("MOH_VISION_SEED", "0"))


def cases(count: int, what: str) -> random.Random:
    """Return the random numbers for a test of `count` cases, and print the seed, which pytest shows if the test fails."""
    print(f"{what}: N {count}, MOH_VISION_SEED={SEED}")
    return random.Random(SEED)
