"""Seeds of random streams."""

import hashlib
import struct
from enum import IntEnum


class Stream(IntEnum):
    """What random numbers are used for. The last part of a seed, so that different uses get unrelated numbers.

    Two seeds have no such part: (seed, epoch) for the order of samples, and (seed, position) for augmentation. The
    values below must never change: a resumed run would draw other random numbers.
    """

    DIFFUSION = 1  # timestep, noise and label dropout of a sample; class of a generated image
    MIXING = 2  # mixup and cutmix of a micro-batch
    POSTERIOR = 3  # the draw from a VAE's posterior, and whether to mirror the image
    BUDGETS = 4  # the share of active heads of a step
    SHARDS = 5  # the order of a stream's shards and samples
    SUBSET = 10  # which sentence pairs stay in a subset of the data
    LENGTHS = 11  # the order of batches, each with sentences of similar length
    MASKS = 12  # which tokens a masked language model has to predict
    ROUNDS = 21  # the order of the sources of a mixture
    BLOCKS = 22  # the order of the blocks of a source


def derive_seed(*parts: int) -> int:
    """Hash integers to a 63-bit seed; nearby integers give unrelated seeds."""
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
