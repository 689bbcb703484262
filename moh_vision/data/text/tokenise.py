"""Forwards to `moh_vision.language.data.tokenise`."""

from moh_vision.language.data.tokenise import main

if __name__ == "__main__":
    raise SystemExit(main())
