"""Forwards to `moh_vision.language.models.llama.cache`."""

from moh_vision.language.models.llama.cache import *  # noqa: F403
