"""Forwards to `moh_vision.diffusion.latents.__main__`."""

from moh_vision.diffusion.latents.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main())
