"""Seeds of random streams."""

import hashlib
import struct
from enum import IntEnum


class Stream(IntEnum):
    """What random numbers are for: the last part of a seed, so that streams are unrelated.

    Two streams have none: (seed, epoch) orders the samples, (seed, position) augments a sample. A number
    never changes its meaning: a run would go on with other random numbers.
    """

    DIFFUSION = 1  # timestep, noise and dropped label of a sample; class of a generated image
    MIXING = 2  # mixup and cutmix of a micro-batch
    POSTERIOR = 3  # the draw from a VAE's posterior, and whether to mirror the image
    BUDGETS = 4  # the share of active heads of a step
    SHARDS = 5  # the order of a stream's shards and samples
    SUBSET = 10  # which sentence pairs stay
    LENGTHS = 11  # the order of batches of like lengths
    MASKS = 12  # which tokens a masked language model has to find
    ROUNDS = 21  # the order of the sources of a mixture
    BLOCKS = 22  # the order of the blocks of a source


def derive_seed(*parts: int) -> int:
    """Return a 63-bit seed, well mixed: neighbouring numbers give unrelated streams."""
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
