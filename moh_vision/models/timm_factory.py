"""timm.create_model(..., checkpoint_path=FILE) for our models."""

import timm.models._factory as factory

from moh_vision.models.weights import load_checkpoint


def read_checkpoints_of_our_models() -> None:
    """Let timm's factory hand the files of our models to `load_checkpoint`; those of timm's own it reads as before.

    timm takes the weights under "model" where an official DiT file has the EMA beside them, which are not those of the
    papers' tables, and has no filter for a family at this place.
    """
    theirs = factory.load_checkpoint

    def load(model, checkpoint_path, *args, **kwargs):
        if hasattr(model, "checkpoint_filter"):
            return load_checkpoint(model, checkpoint_path)
        return theirs(model, checkpoint_path, *args, **kwargs)

    factory.load_checkpoint = load
