"""Find a font for the names in a grid: Pillow's own font draws boxes for all but Latin letters without accents."""

from functools import lru_cache
from pathlib import Path

from PIL import ImageFont

NO_CHARACTER = "\U0010ffff"  # no font has it, so a font draws it like every character that it lacks


def font_for(text: str, size: int) -> ImageFont.FreeTypeFont:
    """Return a font with all characters of a text, or else the font that lacks the fewest; see `drawable`."""
    file = _font_file(frozenset(text))
    if file is None:
        return ImageFont.load_default(size)
    return ImageFont.truetype(file, size)


def drawable(text: str, font: ImageFont.FreeTypeFont) -> str:
    """Return a text with characters that the font lacks written as ASCII escapes, such as \\u732b."""
    for character in _missing(font, frozenset(text)):
        text = text.replace(character, character.encode("ascii", "backslashreplace").decode())
    return text


@lru_cache
def _font_file(characters: frozenset[str]) -> str | None:
    """Return the font file that lacks the fewest characters; None for Pillow's own font.

    Of fonts that lack equally many, the first is taken: Pillow's, matplotlib's DejaVu, then the system's fonts.
    """
    best = None
    fewest = len(_missing(ImageFont.load_default(), characters))
    if not fewest:
        return best
    import matplotlib
    from matplotlib import font_manager

    dejavu = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    for file in map(str, [dejavu, *sorted(font_manager.findSystemFonts())]):
        try:
            missing = len(_missing(ImageFont.truetype(file), characters))
        except OSError:  # not a font that Pillow can scale
            continue
        if missing < fewest:
            fewest = missing
            best = file
        if not fewest:
            break
    return best


def _missing(font: ImageFont.FreeTypeFont, characters: frozenset[str]) -> set[str]:
    """Return the characters that the font lacks; every font is taken to have those of ASCII."""
    box = bytes(font.getmask(NO_CHARACTER))
    return {c for c in characters if not c.isascii() and bytes(font.getmask(c)) == box}
