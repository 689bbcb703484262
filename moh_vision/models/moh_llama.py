"""Forwards to `moh_vision.language.models.llama.model`."""

from moh_vision.language.models.llama.model import *  # noqa: F403
