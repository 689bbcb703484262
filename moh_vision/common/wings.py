"""The three wings of the package, and what each is called in scripts, configurations and messages."""

from typing import NamedTuple


class Wing(NamedTuple):
    """A kind of training run.

    Attributes:
        name: the value of `kind`, in config.yaml and in what `moh_vision.open_run` returns.
        script: name of the training script.
        configurations: name of the wing's folder in configs/.
        title: what messages call the wing's models.
    """

    name: str
    script: str
    configurations: str
    title: str


CLASSIFICATION = Wing("classification", "train_cls.py", "cls", "classifier")
DIFFUSION = Wing("diffusion", "train_dit.py", "dit", "diffusion")
TEXT = Wing("text", "train_text.py", "text", "text")
WINGS = {wing.name: wing for wing in (CLASSIFICATION, DIFFUSION, TEXT)}
