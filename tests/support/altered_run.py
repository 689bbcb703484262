"""Run a training script in float64, or let a batch of one process overflow.

python altered_run.py in_float64 cls|dit ARGUMENTS
python altered_run.py overflow:RANK:STEP cls|dit ARGUMENTS
"""

import os
import sys

import torch

alteration, *where = sys.argv[1].split(":")
if alteration == "in_float64":
    torch.set_default_dtype(torch.float64)  # before the package is imported, which may make tensors

from moh_vision.classification import scores  # noqa: E402
from tests.support.small_runs import script  # noqa: E402

module = script(sys.argv[2])
batches = module.training_loader
evaluate = scores.evaluate


# The two alterations of the training loader; `alteration` names one of them.


def double(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor


def in_float64(*args, **kwargs):
    for batch in batches(*args, **kwargs):
        yield {key: double(tensor) for key, tensor in batch.items()}


def overflow(*args, **kwargs):
    for number, batch in enumerate(batches(*args, **kwargs)):
        if [os.environ.get("RANK", "0"), str(number)] == where:
            batch["images"] *= 3e38
        yield batch


def evaluate_in_float64(predict, *more):
    return evaluate(lambda images, labels: predict(images.double(), labels), *more)


module.training_loader = globals()[alteration]
if alteration == "in_float64":
    scores.evaluate = evaluate_in_float64
module.main(sys.argv[3:])
