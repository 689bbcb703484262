"""The three wings of the package, and what each is called in scripts, configurations and messages."""

from typing import NamedTuple


class Wing(NamedTuple):
    """A kind of training run.

    Attributes:
        name: `kind` in config.yaml, and of what `moh_vision.open_run` returns.
        script: the training script.
        configurations: the folder of its files in configs/.
        title: what messages call its models.
    """

    name: str
    script: str
    configurations: str
    title: str


CLASSIFICATION = Wing("classification", "train_cls.py", "cls", "classifier")
DIFFUSION = Wing("diffusion", "train_dit.py", "dit", "diffusion")
TEXT = Wing("text", "train_text.py", "text", "text")
WINGS = {wing.name: wing for wing in (CLASSIFICATION, DIFFUSION, TEXT)}
