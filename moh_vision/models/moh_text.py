"""Forwards to `moh_vision.language.models.create`."""

from moh_vision.language.models.create import *  # noqa: F403
