"""The wheel and the source distribution: what they hold, and that the wheel runs away from the clone."""

import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


def run(*words, **options) -> str:
    result = subprocess.run(words, capture_output=True, text=True, timeout=600, **options)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, source distribution); the wheel is built from the latter, as pip does it."""
    clone = tmp_path_factory.mktemp("clone")
    folder = tmp_path_factory.mktemp("dist")
    files = run("git", "ls-files", "-z", cwd=ROOT).split("\0")[:-1]
    subprocess.run(["tar", "-cf", clone / "all.tar", *files], cwd=ROOT, check=True)
    run("tar", "-xf", "all.tar", cwd=clone)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ".", cwd=clone)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


def test_the_wheel_holds_the_package_alone(built):
    with zipfile.ZipFile(built[0]) as archive:
        names = set(archive.namelist())
    tracked = run("git", "ls-files", "-z", "moh_vision", "configs", cwd=ROOT).split("\0")[:-1]
    expected = {name if name.startswith("moh_vision") else f"moh_vision/{name}" for name in tracked}
    expected.discard("moh_vision/configs")  # the link
    inside = {n for n in names if n.startswith("moh_vision/")}
    info = {n for n in names if ".dist-info/" in n}
    assert inside == expected
    assert names == inside | info
    assert any(name.endswith("/licenses/LICENSE") for name in info)


def test_the_source_distribution_is_the_repository(built):
    """`make quickstart` and `make test` run in it; only hidden files, of git and its host, are missing."""
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = run("git", "ls-files", "-z", cwd=ROOT).split("\0")[:-1]
    visible = {name for name in tracked if not name.startswith(".")}
    assert visible <= names
    # The link to configs/ is a folder of copies.
    assert "moh_vision/configs/quickstart/dit.yaml" in names


def test_the_wheel_runs_away_from_the_clone(built, tmp_path):
    """Installed without dependencies; those of this environment stand behind it."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, built[0])
    behind = run(
        sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"
    ).strip()
    environment = {"PYTHONPATH": behind, "PATH": "/usr/bin:/bin"}
    code = "import moh_vision; print(moh_vision.__file__)"
    assert run(python, "-c", code, cwd=tmp_path, env=environment).startswith(site)
    words = [
        "-m",
        "moh_vision.classification.train",
        "--config",
        "quickstart/cls",
        "--dry_run",
        "true",
    ]
    assert "head" in run(python, *words, "--output", "run", cwd=tmp_path, env=environment)
