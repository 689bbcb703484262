"""Models need nothing that Windows lacks; what needs it says so."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil

from moh_vision.attention.kernels import build
from moh_vision.data import shard_writer, write_shards
from moh_vision.data.shards import Shards
from moh_vision.data.workers import end_workers
from moh_vision.diffusion.latents.stored import LatentCache
from moh_vision.engine.logging import peak_memory_mib
from tests.support.paths import ROOT
from tests.support.refusals import refuse

# Other packages are imported first, because they have code of their own for Windows.
BEFORE = """
import os, signal, sys
import accelerate.utils, filelock, multiprocessing.util, psutil, sacrebleu, sklearn.datasets, timm, torch, transformers
import torch.distributed.checkpoint, torch.distributed.elastic.multiprocessing, webdataset
from diffusers import AutoencoderKL, DiffusionPipeline
from transformers import PreTrainedModel

sys.modules.update(fcntl=None, resource=None)
for name in ("fork", "getuid", "killpg", "pread", "register_at_fork", "sched_getaffinity", "sysconf", "uname"):
    delattr(os, name)
for name in ("SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGUSR1", "pthread_sigmask", "setitimer"):
    delattr(signal, name)
"""

MODELS = """
import moh_vision
small = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5)
routed = dict(head_budget=0.7, **small)
images = torch.randn(2, 3, 32, 32)
model = timm.create_model("moh_vit_tiny_patch16_224", **routed).eval()
logits = model(images)
timm.models.save_for_hf(model, "folder", model_args=routed, safe_serialization=True)
loaded = timm.create_model("local-dir:folder", pretrained=True).eval()
assert loaded(images).equal(logits)
assert moh_vision.load_run("folder").eval()(images).equal(logits)
torch.save(model.state_dict(), "model.pth")
other = timm.create_model("moh_vit_tiny_patch16_224", **routed).eval()
moh_vision.load_checkpoint(other, "model.pth")
assert other(images).equal(logits)
dense = timm.create_model("vit_tiny_patch16_224", **small).eval()
expected = dense(images)
converted = moh_vision.convert(dense, head_budget=0.7, calibrate=[images]).eval()
moh_vision.set_head_budget(converted, 1.0)
torch.testing.assert_close(converted(images), expected)
moh_vision.measure(model, images)
"""

# Not what runs when it is imported, nor what needs the built operators or lm_eval.
EVERY_MODULE = """
import importlib, pkgutil
for module in pkgutil.walk_packages(moh_vision.__path__, "moh_vision."):
    if not module.name.endswith(("__main__", "kernels.library", "evaluation.harness")):
        importlib.import_module(module.name)
"""


def test_models_are_made_converted_and_loaded_where_nothing_of_posix_is_there(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + MODELS + EVERY_MODULE],
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(ROOT), MOH_VISION_CACHE=str(tmp_path / "cache")),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_shards_and_latents_are_refused_without_pread(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "pread")
    facts = f"{tmp_path} shards os.pread Linux macOS {sys.platform}"
    refuse(facts, Shards, str(tmp_path), "train")
    refuse(facts, shard_writer.ShardWriter, tmp_path / "train.shards.json", {}, None, {})
    (tmp_path / "train.meta.json").write_text("{}")
    refuse(facts, LatentCache, str(tmp_path), "train")


def test_counts_of_cores_and_memory_on_other_systems(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert write_shards._cores() == os.cpu_count()
    monkeypatch.setitem(sys.modules, "resource", None)
    memory = SimpleNamespace(peak_wset=3 * 2**20)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: memory))
    assert peak_memory_mib() == 3


def test_workers_end_without_sigchld(monkeypatch):
    monkeypatch.delattr(signal, "SIGCHLD")
    worker = multiprocessing.Process(target=time.sleep, args=(600,), daemon=True)
    worker.start()
    end_workers()
    worker.join(60)
    assert worker.exitcode == -signal.SIGKILL


def test_the_operators_are_built_on_linux_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    refuse("C++ operators Linux win32", build.build)
