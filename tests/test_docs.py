"""README and docs: links lead somewhere, generated pages are those of the code, README stays short."""

import importlib.util
import re
from pathlib import Path

import pytest

from moh_vision.classification.config import ClsConfig
from moh_vision.diffusion.config import DitConfig
from moh_vision.engine.keys import keys_of
from moh_vision.language.config import LanguageConfig

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert "://" in target or file.exists() and (not anchor or anchor in anchors(file)), target
    if page.name != "CHANGELOG.md":  # it names files as they were called then
        named = re.findall(r"(?<![\w/.-])docs/[\w/-]+\.md", text)
        assert [name for name in named if not (ROOT / name).exists()] == []
    # Importing moh_vision does not make our types known to transformers; that these lines do: tests/commands/test_publish.py.
    ours = re.compile(r"^(import|from) moh_vision\.language\.models\.(create|llama\.model)\b", re.M)
    code = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert [block for block in code if "AutoModelFor" in block and not ours.search(block)] == []


def test_environment_variables_are_on_their_page():
    read = r"""environ(?:\.get\(|\.setdefault\(|\[)"(\w+)"|"(\w+)" in os\.environ|^(?:BUILD|VARIABLE) = "(\w+)\""""
    product, tests = (
        "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / room).rglob("*.py")))
        for room in ("moh_vision", "tests")
    )
    found = {name for names in re.findall(read, product, re.M) for name in names if name}
    found -= {"ACCELERATE_USE_CPU"}  # is set, not read
    found |= set(re.findall(r"environ\.get\(\"(MOH_VISION_\w+)\"", tests))
    page = (ROOT / "docs/reference/environment.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page, re.M)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == found
    named = {name for text in (product, tests) for name in re.findall(r"MOH_VISION_[A-Z0-9]+(?!\w)", text)}
    assert named <= found


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130 and len(text.split()) <= 1200
    assert [line for line in text.splitlines() if len(line) > 100] == []


def test_every_guide_is_in_the_table_of_contents():
    shown = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page != "README.md" and f"({page})" not in shown] == []


@pytest.mark.parametrize("name", ["config", "commands"])
def test_generated_pages_are_those_of_the_code(reference, name):
    page = (reference.PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert page == getattr(reference, f"{name}_page")(), f"python docs/make_reference.py {name}"


def test_the_models_are_those_of_the_registry(reference):
    page = (reference.PAGES / "models.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)`", page, flags=re.MULTILINE) == [*reference.image_models(), *reference.PAPERS]


def test_the_messages_are_those_of_the_code():
    page = (ROOT / "docs" / "reference" / "messages.md").read_text(encoding="utf-8")
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "moh_vision").rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # one text over several lines
    messages = re.findall(r"^\| `(.*?)` \|", page, flags=re.MULTILINE)
    assert len(messages) > 20
    parts = [part.strip() for message in messages for part in message.split("...") if len(part.strip()) > 3]
    assert [part for part in parts if part not in code] == []


def test_keys_that_a_resumed_run_may_change_are_listed():
    page = (ROOT / "docs" / "guides" / "scale.md").read_text(encoding="utf-8")
    listed = page.split("Accepted keys:")[1].split(";")[0]
    kinds = (ClsConfig, DitConfig, LanguageConfig)
    free = {name for kind in kinds for name, found in keys_of(kind).items() if found.about["free"]}
    named = set(re.findall(r"`([\w.]+)`", listed))  # a section stands for all its keys
    assert {name.partition(".")[0] if name.partition(".")[0] in named else name for name in free} == named | {"output"}
