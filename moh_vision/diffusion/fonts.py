"""A font for the names in a grid: Pillow's own has Latin letters without accents, and draws boxes for others."""

from functools import lru_cache
from pathlib import Path

from PIL import ImageFont

NO_CHARACTER = "\U0010ffff"  # which no font has: it is drawn as what is missing


def font_for(text: str, size: int) -> ImageFont.FreeTypeFont:
    """Return a font that has all characters of a text, or else most of them; see `drawable`."""
    file = _font_file(frozenset(text))
    return ImageFont.truetype(file, size) if file else ImageFont.load_default(size)


def drawable(text: str, font: ImageFont.FreeTypeFont) -> str:
    """Return a text with what the font lacks in ASCII: the cat of Japanese is \\u732b."""
    missing = _missing(font, frozenset(text))
    return "".join(
        c.encode("ascii", "backslashreplace").decode() if c in missing else c for c in text
    )


@lru_cache
def _font_file(characters: frozenset[str]) -> str | None:
    """Find the font file that lacks the fewest characters: None (Pillow's own), matplotlib's DejaVu, the system's."""
    fewest, best = len(_missing(ImageFont.load_default(), characters)), None
    if not fewest:
        return best
    import matplotlib
    from matplotlib import font_manager

    own = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    for file in map(str, [own, *sorted(font_manager.findSystemFonts())]):
        try:
            missing = len(_missing(ImageFont.truetype(file), characters))
        except OSError:  # bitmap fonts
            continue
        if missing < fewest:
            fewest, best = missing, file
        if not fewest:
            break
    return best


def _missing(font: ImageFont.FreeTypeFont, characters: frozenset[str]) -> set[str]:
    box = font.getmask(NO_CHARACTER)
    return {
        c for c in characters if not c.isascii() and bytes(font.getmask(c)) == bytes(box)
    }  # letters of ASCII are in every font
