"""A font for the names in a grid: Pillow's own has Latin letters without accents, and draws boxes for others."""

from functools import lru_cache
from pathlib import Path

from PIL import ImageFont

NO_CHARACTER = "\U0010ffff"  # which no font has: it is drawn as what is missing


def font_for(text: str, size: int) -> ImageFont.FreeTypeFont:
    """Return a font that has all characters of a text, or else most of them; see `drawable`."""
    file = _font_file(frozenset(text))
    if file is None:
        return ImageFont.load_default(size)
    return ImageFont.truetype(file, size)


def drawable(text: str, font: ImageFont.FreeTypeFont) -> str:
    """Return a text with what the font lacks in ASCII: the cat of Japanese is \\u732b."""
    for character in _missing(font, frozenset(text)):
        text = text.replace(character, character.encode("ascii", "backslashreplace").decode())
    return text


@lru_cache
def _font_file(characters: frozenset[str]) -> str | None:
    """Find the font file that lacks the fewest characters: None (Pillow's own), matplotlib's DejaVu, the system's."""
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
        except OSError:  # bitmap fonts
            continue
        if missing < fewest:
            fewest = missing
            best = file
        if not fewest:
            break
    return best


def _missing(font: ImageFont.FreeTypeFont, characters: frozenset[str]) -> set[str]:
    box = bytes(font.getmask(NO_CHARACTER))
    # Letters of ASCII are in every font.
    return {c for c in characters if not c.isascii() and bytes(font.getmask(c)) == box}
