"""A classifier and one image for `moh_vision.analysis.patches` and `attention_maps`."""

from pathlib import Path
from typing import List

import torch

from moh_vision.analysis.patches import OneImage
from moh_vision.classification.config import OpenedClsConfig
from moh_vision.classification.predict import class_names
from moh_vision.classification.validate import open_classifier
from moh_vision.data.decode import decode_image
from moh_vision.data.imagenet import validation_transform
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.io import run_of


def open_image(argv: List[str], file: str, command: str) -> OneImage:
    """Open the model of --checkpoint and an image as validation sees it.

    A folder that has the name of a class tells the image's true class.
    """
    found = decode_image(Path(file).read_bytes(), file)
    model, about = open_classifier(parse_config(OpenedClsConfig, argv, command))
    cfg = model.pretrained_cfg
    image = validation_transform(cfg)(found)  # [C, h, w]
    mean, std = (torch.tensor(cfg[key]).view(-1, 1, 1) for key in ("mean", "std"))
    seen = (image * std + mean).clamp(0, 1).expand(3, -1, -1).permute(1, 2, 0).numpy()
    names, folder = class_names(about["classes"], model.num_classes), Path(file).absolute().parent.name
    with torch.no_grad():
        probability, predicted = model(image[None])[0].softmax(-1).max(-1)
    found = dict(
        run=(run_of(about["weights"]).resolve() if about["of_run"] else Path(about["weights"])).name,
        weights=about["weights"],
        model=about["name"],
        image=file,
        img_size=about["img_size"],
        predicted=names[predicted],
        probability=probability.item(),
        true=dict(zip(about["classes"] or (), names)).get(folder),
    )
    return OneImage(model, image, seen, found)
