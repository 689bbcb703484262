"""The command report: its HTML pages about small runs, read again by an HTML parser."""

import gzip
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from moh_vision.__main__ import main
from moh_vision.classification import train as train_cls
from moh_vision.commands.report_figures import POINTS, draw_curves, embed, svg_settings
from moh_vision.commands.runs import read_runs
from moh_vision.commands.table import make_table
from moh_vision.diffusion import train as train_dit
from tests.support import small_runs
from tests.support.refusals import assert_says, refuse, refused

VOID = {"meta", "img", "br"}


@pytest.fixture(scope="module")
def runs(trained):
    drawn = "--preview.every 1 --preview.images 4 --preview.steps 2".split()
    return dict(
        cls=trained("cls", 4, "--eval_every", "2"),
        dit=trained("dit", 4, *drawn),
        text=trained("text", 2),
    )


class Page(HTMLParser):
    """A parsed page: its tags, ids and values of src and href, and its text with all white space as single spaces.

    Asserts that tags are balanced and that no attribute holds a script.
    """

    def __init__(self, markup):
        super().__init__()
        self.open = []
        self.loads = []
        self.ids = []
        self.tags = []
        self.words = []
        self.feed(markup)
        self.close()
        assert not self.open, self.open
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href"):
                self.loads.append(value)
            elif name == "id":
                self.ids.append(value)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def page_of(folder, *runs):
    """Run the command on runs and return its page, of which links and references are checked."""
    output = folder / "report.html"
    output.unlink(missing_ok=True)
    assert main(["report", *map(str, runs), "--output", str(output)]) == 0
    markup = output.read_text(encoding="utf-8")
    page = Page(markup)
    assert page.tags.count("html") == page.tags.count("body") == 1 and "script" not in page.tags
    referred = [load[1:] for load in page.loads if load.startswith("#")]
    referred += re.findall(r"url\(#([^)]*)\)", markup)
    assert len(set(page.ids)) == len(page.ids) and set(referred) <= set(page.ids) and referred
    assert all(load.startswith(("#", "data:image/")) for load in page.loads)
    assert not re.search(r"@import|url\((?!#)", markup)
    return page


def test_runs_of_each_wing(runs, tmp_path, capsys):
    page = page_of(tmp_path, runs["cls"], runs["dit"], runs["text"])
    for name in ("cls", "text"):  # the page has the table of the command table
        table = make_table(read_runs([runs[name]]))
        for text in (*table.titles, *table.rows[0], *table.notes):
            assert text in page.text
    assert f"{runs['dit']} has no scores yet: python sample.py" in page.text
    for title in (
        "training loss",
        "validation loss",
        "validation: top-1, %",
        "balance loss",
        "learning rate",
    ):
        assert title in page.text
    # Of the samples of four steps, the page shows the first, the middle and the last.
    assert page.text.count("after ") == 3
    assert "after 1 steps after 3 steps after 4 steps" in page.text
    assert "images of each class by what they were taken for" in page.text
    assert "cls: heads of each layer" in page.text
    assert "cls: share of tokens that run each head, by class" in page.text
    assert "dit has no head_load.json" in page.text
    # Each translation follows its source and its reference.
    lines = (runs["text"] / "translations.txt").read_text().splitlines()
    source = Path(small_runs.pairs(), "val.de").read_text().splitlines()
    target = gzip.open(f"{small_runs.pairs()}/val.en.gz", "rt").read().splitlines()
    first = f"de (source) {source[0]} en (reference) {target[0]} text {lines[0]}"
    assert " ".join(first.split()) in page.text
    assert "input [1, 1, 8, 8]" in page.text
    # --dry-run prints the same parameters and MACs.
    for name, script in dict(cls=train_cls, dit=train_dit).items():
        capsys.readouterr()
        script.main([*small_runs.arguments(name, runs[name], 4, 100), "--dry-run"])
        _, _, described = capsys.readouterr().out.partition("parameters: ")
        assert "of dense ideal" in " ".join(described.split()) in page.text
    command = json.loads((runs["cls"] / "environment.jsonl").read_text())["command"]
    assert command in page.text and "max_steps: 4" in page.text
    assert (tmp_path / "report.html").stat().st_size < 1_000_000


def test_groups_of_mlps_have_figures_of_their_own(trained, tmp_path):
    """The model runs all heads, so only its MLPs have a budget to be drawn."""
    options = "--model.scope sample --model.mlp_budget 0.5 --model.head_budget 1.0".split()
    page = page_of(tmp_path, trained("cls", 3, *options))
    assert "cls: groups of each MLP" in page.text and "groups that a token runs" in page.text
    assert "cls: heads of each layer" not in page.text
    assert "cls: share of tokens that run each head and group of an MLP, by class" in page.text
    assert "100 % of the heads and 50 % of the MLPs' groups" in page.text


def test_the_page_says_which_files_are_missing(runs, tmp_path):
    files = "environment.jsonl results.json confusion.json translations.txt head_load.json".split()
    for name in ("cls", "dit", "text"):
        shutil.copytree(runs[name], tmp_path / name)
        for file in files:
            (tmp_path / name / file).unlink(missing_ok=True)
    shutil.rmtree(tmp_path / "dit" / "previews")
    for file in (tmp_path / "cls").glob("*.safetensors"):
        file.unlink()
    metrics = tmp_path / "cls" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 4, "lo')  # a line that is being written
    page = page_of(tmp_path, *(tmp_path / name for name in ("cls", "dit", "text")))
    for line in (
        f"{tmp_path / 'cls'} has no results.json: the run has not ended yet",
        "cls has no confusion.json: a run writes it at its end",
        f"{tmp_path / 'cls'} holds no ema.safetensors",
        "cls has no head_load.json: training of classifiers",
        "dit has no head_load.json: training of classifiers and text writes it at its end, for diffusion "
        "python sample.py ... --head-load RUN/head_load.json",
        "dit has no samples: --preview.every N draws",
        "text has no translations.txt",
        "dit has no environment.jsonl: every start of a run adds a line to it",
    ):
        assert line in page.text, line
    assert page.text.count("training loss") == 3


def test_translations_are_shown_alone_if_their_source_has_changed(runs, tmp_path):
    """A number of lines that differs from the number of pairs shows that the text has changed."""
    shutil.copytree(runs["text"], tmp_path / "text")
    with open(tmp_path / "text" / "translations.txt", "a") as file:
        file.write("one more than there are pairs\n")
    page = page_of(tmp_path, tmp_path / "text")
    assert "(reference)" not in page.text
    assert (tmp_path / "text" / "translations.txt").read_text().splitlines()[0] in page.text


@pytest.mark.parametrize(
    "file",
    ["results.json", "metrics.jsonl", "confusion.json", "head_load.json", "environment.jsonl"],
)
def test_a_bad_file_of_the_last_run_is_refused_before_anything_is_drawn(
    runs, tmp_path, capsys, monkeypatch, file
):
    shutil.copytree(runs["cls"], tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 1"))
    (tmp_path / "run" / file).write_text('{"step": "x", "loss": []}\n["x"]\n')
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    argv = ["report", runs["dit"], runs["cls"], tmp_path / "run", "--output", tmp_path / "a.html"]
    assert_says(refused(capsys, main, *argv), f"report {tmp_path}/run/{file}")
    assert not drawn and not (tmp_path / "a.html").exists()


def test_names_are_escaped(runs, tmp_path):
    """Names of folders and classes are escaped in text, in figures and in attributes."""
    run = tmp_path / '<img src="x" onerror=alert(1)> $a_1$ {{ 7*7 }} _'
    name = '</text><script>alert("2")</script> $x^'
    shutil.copytree(runs["cls"], run)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("seed: 0", "seed: 1"))
    confusion = json.loads((run / "confusion.json").read_text())
    confusion["classes"][0] = name
    (run / "confusion.json").write_text(json.dumps(confusion))
    start = dict(command="<script>3</script>", step=0, date="today")
    (run / "environment.jsonl").write_text(json.dumps(start) + "\n")
    page = page_of(tmp_path, run, runs["cls"])
    assert "img" not in page.tags
    assert run.name in page.text and name[:21] in page.text and "<script>3</script>" in page.text


def test_of_many_classes_the_most_confused_pairs_are_shown(runs, tmp_path):
    shutil.copytree(runs["cls"], tmp_path / "run")
    # [class, predicted class, number of images]
    counts = [[n, n, 50] for n in range(1000)]
    counts += [[n, (n + 1) % 1000, n % 7] for n in range(1000)]
    counts += [[3, 900, 30]]
    file = tmp_path / "run" / "confusion.json"
    file.write_text(json.dumps(dict(classes=[f"class {n}" for n in range(1000)], counts=counts)))
    page = page_of(tmp_path, tmp_path / "run")
    titles = "class taken for images % of the class"
    rows = "class 3 class 900 30 36.1 class 6 class 7 6 10.7 class 13 class 14 6 10.7"
    assert f"{titles} {rows}" in page.text
    assert page.text.count("class 9") < 10  # 20 of 1,000 pairs are shown


def test_a_long_curve_has_few_points_and_keeps_its_mean():
    steps = list(range(1, 100_001))
    values = np.random.default_rng(0).random(100_000)
    with svg_settings():
        picture = draw_curves("loss", {"run": (steps, values)}, {"run": "#123456"})
    (path,) = re.findall(r'd="([^"]*)"[^>]*stroke: #123456', picture.markup)
    heights = [float(line.split()[-1]) for line in path.strip().splitlines()]
    assert 0.5 * POINTS < len(heights) <= POINTS and len(picture.markup) < 50_000


def test_large_pictures_are_made_smaller(runs, tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (1500, 2000, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "large.png")
    picture = embed(tmp_path / "large.png", 400, "a & b")
    assert picture.width == 400 and len(picture.markup) < 300_000
    assert 'alt="a &amp; b"' in picture.markup
    (tmp_path / "large.png").write_text("no picture")
    refuse(f"{tmp_path}/large.png picture", lambda: embed(tmp_path / "large.png", 400))
    small = embed(runs["dit"] / "previews" / "step_4.png", 400)
    assert small.markup.startswith('<img src="data:image/png;base64,')
