"""A training script in float64: python in_float64.py cls|dit ARGUMENTS"""

import sys

import torch

torch.set_default_dtype(torch.float64)

from moh_vision.classification import scores  # noqa: E402
from moh_vision.classification import train as train_cls  # noqa: E402
from moh_vision.diffusion import train as train_dit  # noqa: E402

script = dict(cls=train_cls, dit=train_dit)[sys.argv[1]]
batches, evaluate = script.training_batches, scores.evaluate


def in_float64(*args, **kwargs):
    for batch in batches(*args, **kwargs):
        yield {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


script.training_batches = in_float64
scores.evaluate = lambda predict, *more: evaluate(lambda images, labels: predict(images.double(), labels), *more)
script.main(sys.argv[2:])
