"""Networks that extract features: FID's Inception, timm models, or any module."""

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moh_vision.common.errors import reason_of
from moh_vision.common.wings import CLASSIFICATION
from moh_vision.models.weights import find_weights

# torch-fidelity's file; its name ends in the first digits of its sha256.
PUBLISHED = "weights-inception-2015-12-05-6726825d.pth"
PUBLISHED_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
SPATIAL_CHANNELS = 7


class Extracted(NamedTuple):
    """What an extractor gives for a batch of B images."""

    pooled: Tensor  # [B, F]
    spatial: Tensor | None = None  # [B, F']
    logits: Tensor | None = None  # [B, classes]


class Extractor(nn.Module):
    """Base class of networks from uint8 images [B, 3, H, W] to `Extracted`."""

    name: str  # in results
    # True: FID's Inception with its published weights, so that scores are called FID, sFID, IS and KID.
    published = False
    weights_sha256: str | None = None  # of the file or the parameters


class Inception(Extractor):
    """torch-fidelity's Inception with TensorFlow's resizing; `weights`: its .pth file, None: fetched once.

    pooled: the 2,048 features of the last pooling. spatial: the first 7 channels of Mixed_6d's 1 x 1 branch, 17 x 17,
    flattened by position, 2,023 features (Nash 2021, as in ADM's evaluator). logits: without the bias, as in ADM's.
    """

    def __init__(self, weights: str | Path | None = None):
        super().__init__()
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        file = _inception_file(weights)
        data = file.read_bytes()  # once: what is hashed, checked and used are the same bytes
        self.weights_sha256 = hashlib.sha256(data).hexdigest()
        try:
            network = FeatureExtractorInceptionV3(
                "inception", ["2048", "logits_unbiased"], _only_tensors(data)
            )
        except Exception as error:  # damaged files raise exceptions of many classes
            raise ValueError(
                f"{file}: not the weights of Inception in torch-fidelity's layout ({reason_of(error)})"
            ) from None
        # channels_last is 1.5 times faster on a CPU (docs/guides/sampling.md); scores change by 1e-6.
        self.network = network.to(memory_format=torch.channels_last)
        self.published = self.weights_sha256 == PUBLISHED_SHA256
        if self.published:
            self.name = "inception-v3-compat"
        else:
            self.name = f"Inception with unknown weights {file.name}"

    def forward(self, images: Tensor) -> Extracted:
        maps: list[Tensor] = []

        def keep(module: nn.Module, inputs: tuple, output: Tensor) -> None:
            maps.append(output)

        with self.network.Mixed_6d.branch1x1.register_forward_hook(keep):
            pooled, logits = self.network(images)
        spatial = maps[0][:, :SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1)
        return Extracted(pooled, spatial.float(), logits)


class TimmExtractor(Extractor):
    """The penultimate features of a timm model, and its logits if it has classes.

    Whole images are resized to `img_size` (None: the model's own) and normalised as its pretrained_cfg says.
    """

    def __init__(self, model: nn.Module, name: str, img_size: int | Sequence[int] | None = None):
        super().__init__()
        self.model = model.eval()
        self.name = name
        cfg = getattr(model, "pretrained_cfg", None) or {}
        shape = cfg.get("input_size", (3, 224, 224))
        patch_embed = getattr(model, "patch_embed", None)
        size = img_size or getattr(patch_embed, "img_size", None) or shape[1:]
        if not isinstance(size, Sequence):
            size = (size, size)
        self.size = tuple(size)
        self.channels = getattr(model, "in_chans", shape[0])
        self.classifies = bool(getattr(model, "num_classes", 0))
        self.interpolation = cfg.get("interpolation") or "bicubic"
        for key in ("mean", "std"):
            values = tuple(cfg.get(key) or (0.5,) * self.channels)[: self.channels]
            self.register_buffer(key, torch.tensor(values).view(1, -1, 1, 1), persistent=False)
        self.weights_sha256 = parameters_sha256(model)

    def forward(self, images: Tensor) -> Extracted:
        x = images.float() / 255
        if self.channels == 1:
            x = x.mean(1, keepdim=True)
        if tuple(x.shape[2:]) != self.size:
            x = nn.functional.interpolate(x, self.size, mode=self.interpolation, antialias=True)
            x = x.clamp(0, 1)
        hidden = self.model.forward_features((x - self.mean) / self.std)
        logits = None
        if self.classifies:
            logits = self.model.forward_head(hidden).float()
        return Extracted(self.model.forward_head(hidden, pre_logits=True).float(), logits=logits)


class ModuleExtractor(Extractor):
    """Any module from uint8 images [B, 3, H, W] to features [B, F]."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module.eval()
        self.name = type(module).__name__
        self.weights_sha256 = parameters_sha256(module)

    def forward(self, images: Tensor) -> Extracted:
        features = self.module(images)
        if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(images):
            given = type(features).__name__
            if isinstance(features, Tensor):
                given = list(features.shape)
            raise ValueError(
                f"extractor {self.name} gives {given} for {len(images)} images; expected [B, features]"
            )
        return Extracted(features.float())


def make_extractor(
    extractor: str | nn.Module, inception_weights: str | Path | None = None
) -> Extractor:
    """Make the extractor for `score`.

    `extractor` is "inception", the path of a classification run, "timm:NAME" or "timm:local-dir:FOLDER" (as timm saves
    for the hub), either with "@SIZE" for another image size, or any module from uint8 images to features.
    """
    if isinstance(extractor, Extractor):
        return extractor
    if isinstance(extractor, nn.Module):
        return ModuleExtractor(extractor)
    if extractor == "inception":
        return Inception(inception_weights)
    if inception_weights is not None:
        raise ValueError(
            f"inception_weights {inception_weights} has no effect with extractor {extractor}, only with inception"
        )
    if Path(extractor).exists():
        found = find_weights(extractor, wing=CLASSIFICATION.name, key="extractor")
        name = f"{found.architecture} of {found.said}"
        return TimmExtractor(found.build(), name, img_size=found.arguments.get("img_size"))
    if not extractor.startswith("timm:"):
        raise ValueError(
            f"extractor {extractor!r} is not inception, timm:NAME, a classification run, or a module"
        )
    return _from_timm(extractor.removeprefix("timm:"))


def _from_timm(spec: str) -> TimmExtractor:
    """Make the extractor of "NAME", "local-dir:FOLDER", or one of them with "@SIZE"."""
    import timm

    name, _, size = spec.rpartition("@")
    if not size.isdecimal() or not name:
        name = spec
        size = ""
    folder = name.removeprefix("local-dir:")
    if folder == name and not timm.is_model(name.split(".")[0]):
        raise ValueError(f"extractor {'timm:' + spec!r}: timm has no model {name!r}")
    try:
        model = find_weights(name, wing=CLASSIFICATION.name).build()
        if size and not hasattr(model, "set_input_size"):
            raise ValueError(f"{type(model).__name__} takes no other size; leave @{size} out")
        if size:
            model.set_input_size(img_size=(int(size), int(size)))
    except Exception as error:  # a folder can be damaged in many ways
        raise ValueError(f"extractor {'timm:' + spec!r}: {reason_of(error)}") from None
    if folder != name:
        spec = f"{model.pretrained_cfg['architecture']} of {spec.removeprefix('local-dir:')}"
    return TimmExtractor(model, spec)


@torch.no_grad()
def num_features(network: Extractor) -> int:
    """Return the number of features, found with two black images; raise ValueError if the network fails on them."""
    try:
        pooled = network.eval()(torch.zeros(2, 3, 64, 64, dtype=torch.uint8)).pooled
        if pooled.ndim != 2:
            raise ValueError(f"it gives {list(pooled.shape)} for 2 images; expected [2, features]")
    except Exception as error:  # models fail in many ways
        raise ValueError(
            f"extractor {network.name} cannot take images: {reason_of(error)}"
        ) from None
    return pooled.shape[1]


def parameters_sha256(module: nn.Module) -> str:
    """Hash all tensors of a module, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(data.numpy().tobytes())
    return digest.hexdigest()


def _inception_file(weights: str | Path | None) -> Path:
    """Return the path of Inception's weights: the given file or else the published one, which is fetched once."""
    if weights is not None:
        file = Path(weights)
        if not file.is_file():
            raise FileNotFoundError(
                f"inception_weights {file}: no such file ({PUBLISHED} of torch-fidelity's release)"
            )
        return file
    file = Path(torch.hub.get_dir()) / "checkpoints" / PUBLISHED
    if file.is_file():
        return file
    from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(
            URL_INCEPTION_V3, str(file), hash_prefix=PUBLISHED_SHA256, progress=False
        )
    except (OSError, RuntimeError) as error:  # RuntimeError: what was fetched has another sha256
        raise FileNotFoundError(
            f"the weights of Inception, {PUBLISHED}, are neither at {file} nor could they be fetched from "
            f"{URL_INCEPTION_V3} ({reason_of(error)}); put the file there, or give its path: "
            "--inception-weights FILE (train_dit.py: --score.inception_weights); or other features: --extractor RUN (a "
            "classifier of train_cls.py) or timm:NAME"
        ) from None
    return file


def _only_tensors(data: bytes) -> io.BytesIO:
    """Return a .pth file with the same tensors; refuse other objects, which torch-fidelity would unpickle."""
    state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(type(value) is Tensor for value in state.values()):
        raise ValueError("expected names and tensors")
    checked = io.BytesIO()
    torch.save(dict(state), checked)
    return io.BytesIO(checked.getvalue())
