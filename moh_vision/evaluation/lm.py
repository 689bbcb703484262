"""Forwards to `moh_vision.language.evaluation.lm`."""

from moh_vision.language.evaluation.lm import main

if __name__ == "__main__":
    raise SystemExit(main())
