"""2,000 steps: memory, open files and files on disk stay bounded."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from recorded_runs import Runs
from small_runs import arguments, losses

pytestmark = pytest.mark.reliability


@pytest.mark.parametrize("kind, workers", [("cls", 0), ("cls", 1), ("dit", 0)])
def test_two_thousand_steps(tmp_path, kind, workers):
    with Runs() as runs:
        argv = arguments(kind, tmp_path / "run", 2000, 100, "--keep-checkpoints", 2, "--data.workers", workers)
        command, seen = runs.start(kind, argv, tmp_path), []
        place = Path(f"/proc/{command.pid}")
        while True:
            made = losses(tmp_path, kind)
            try:
                memory = next(line for line in (place / "status").read_text().splitlines() if line.startswith("VmRSS"))
                seen.append((len(made), int(memory.split()[1]) / 1024, len(os.listdir(place / "fd"))))
            except (OSError, StopIteration):
                break  # it has ended
            time.sleep(0.1)
        assert command.wait() == 0, command.said()[-2000:]
    steps, mib, files = (np.array(column) for column in zip(*[s for s in seen if 300 <= s[0] < 1990]))
    assert len(steps) > 30, "too few looks at it"
    slope = 1000 * np.polyfit(steps, mib, 1)[0]
    print(f"{kind}, {workers} workers: {slope:+.2f} MB per 1,000 steps at {mib.mean():.0f} MB, {files.max()} files")
    assert slope <= 1.0
    assert np.median(files[-10:]) <= np.median(files[:10])
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2
    assert len([p for p in (tmp_path / "run").rglob("*") if p.is_file()]) < 25
