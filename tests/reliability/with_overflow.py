"""A training script in which one process gets a batch that overflows: python with_overflow.py RANK STEP dit ARGUMENTS"""

import os
import sys

from moh_vision.classification import train as train_cls
from moh_vision.diffusion import train as train_dit

rank, step = int(sys.argv[1]), int(sys.argv[2])
script = dict(cls=train_cls, dit=train_dit)[sys.argv[3]]
batches = script.training_batches


def overflowing(*args, **kwargs):
    for number, batch in enumerate(batches(*args, **kwargs)):
        if number == step and int(os.environ.get("RANK", 0)) == rank:
            batch["images"] *= 3e38
        yield batch


script.training_batches = overflowing
script.main(sys.argv[4:])
