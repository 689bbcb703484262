"""The DiT pipeline: class labels in, images out. Saved pipelines name this path.

diffusers' DiTPipeline takes 1000 for "no class", drops the learned variance, and draws noise without a generator.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput, ModelMixin, SchedulerMixin
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor

from moh_vision.common.io import write_whole
from moh_vision.diffusion import flow_sde, sampling  # noqa: F401  diffusers opens schedulers of imported modules only
from moh_vision.diffusion.config import class_numbers
from moh_vision.diffusion.latents.vae import LatentSpace, decode
from moh_vision.diffusion.sampling import Guidance
from moh_vision.models.dit_transformer import MoHDiTTransformer2DModel, from_diffusers

OUTPUT_TYPES = ("pil", "np", "pt", "latent")


class MoHDiTPipeline(DiffusionPipeline):
    """Class-conditional sampling from a DiT, dense or with head routing, on pixels or on a VAE's latents.

    `scheduler` can be replaced by one of `moh_vision.diffusion.make_scheduler`, or of diffusers made
    `from_config` of it. `from_pretrained` also reads a folder of diffusers' DiTPipeline.

    Args:
        transformer: `moh_vision.models.dit_transformer.MoHDiTTransformer2DModel`, or diffusers' DiT, converted
            with equal outputs. Its config.num_classes is the label that means "no class".
        scheduler: of diffusers, for a model that predicts noise over 1000 steps, or the velocity of a flow.
        vae: decodes latents, scaled by its config, see `LatentSpace`; None: pixels in [-1, 1].
        id2label: names of the classes.
        label_drop: share of labels that training replaced by "no class"; 0 refuses guidance.
        objective: what the transformer predicts, "noise" or a velocity, "flow"; None: as the scheduler.
        downsampling: pixels per side of a latent; None: as the VAE. Later VAEs must have the same.
    """

    model_cpu_offload_seq = "transformer->vae"
    _optional_components = ["vae"]
    _callback_tensor_inputs = ["latents"]

    def __init__(
        self,
        transformer: ModelMixin,
        scheduler: SchedulerMixin,
        vae: ModelMixin | None = None,
        id2label: dict | None = None,
        label_drop: float | None = None,
        objective: str | None = None,
        downsampling: int | None = None,
    ):
        super().__init__()
        # By its name: importing the class takes a second.
        if type(transformer).__name__ == "DiTTransformer2DModel":
            transformer = from_diffusers(transformer)
        if not isinstance(transformer, MoHDiTTransformer2DModel):
            raise ValueError(
                f"the transformer is a {type(transformer).__name__}, expected a DiT of moh_vision or diffusers"
            )
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)
        if id2label is not None:  # JSON has only strings for keys
            id2label = {str(number): name for number, name in id2label.items()}
        self.register_to_config(id2label=id2label, label_drop=label_drop, downsampling=downsampling)
        self.register_to_config(objective=objective or sampling.objective_of(scheduler))
        self._check_parts()
        self.image_processor = VaeImageProcessor()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> Self:
        """Open a pipeline as diffusers does, from safetensors only."""
        return super().from_pretrained(
            pretrained_model_name_or_path, **{"use_safetensors": True, **kwargs}
        )

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """Save as diffusers does, with the pipeline.py that `DiffusionPipeline.from_pretrained` needs."""
        code = "from moh_vision.diffusion import MoHDiTPipeline  # noqa: F401\n"
        write_whole(Path(save_directory, "pipeline.py"), code)
        super().save_pretrained(save_directory, *args, **kwargs)

    @property
    def labels(self) -> dict[str, int]:
        """Class numbers by name."""
        return {str(name): int(k) for k, name in (self.config.id2label or {}).items()}

    def get_label_ids(self, label: str | Sequence[str]) -> list[int]:
        """Return numbers of classes by name, by a word of ImageNet's names, or by number as text."""
        asked = [label] if isinstance(label, str) else list(label)
        if not self.labels:
            raise ValueError(
                f"class_labels {asked[:5]}: this pipeline has no class names, pass class numbers"
            )
        names = {int(number): str(name) for number, name in self.config.id2label.items()}
        return class_numbers("class_labels", asked, names, self.transformer.config.num_classes)

    @torch.no_grad()
    def __call__(  # noqa: PLR0913
        self,
        class_labels: int | str | Sequence[int | str] | Tensor,
        guidance_scale: float = 4.0,
        guide_channels: int | str | None = None,
        guidance_interval: tuple[float, float] | None = None,
        num_inference_steps: int = 250,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., dict | None] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        on_routing: Callable[[list, Tensor, Tensor], None] | None = None,
        guide: str | ModelMixin | None = None,
        guide_scale: float = 1.0,
    ) -> ImagePipelineOutput | tuple:
        """Draw one image per label.

        Args:
            class_labels: B class numbers or names; num_classes, 0 of a model without classes, draws without a class
                and without guidance.
            guidance_scale, guide_channels, guidance_interval: see `moh_vision.diffusion.Guidance`.
            num_inference_steps: steps of the scheduler.
            generator: one per image for all its noise, or a single one (None: torch's own) that gives the images seeds
                in order: image i does not depend on how many follow. Equal noise gives equal bits at equal batch size.
            latents: first noise, N(0, 1) [B, C, h, w], not scaled; None: from `generator`, as all later noise.
            output_type: "pil", "np" [B, H, W, C] or "pt" [B, C, H, W] in 0 .. 1, or "latent": not decoded.
            return_dict: return an `ImagePipelineOutput`; False: a tuple.
            callback_on_step_end: (pipeline, step, timestep, dict(latents=...)) -> dict of new latents, or None.
            callback_on_step_end_tensor_inputs: what that dict holds: "latents".
            on_routing: called after each pass with arguments of `moh_vision.models.head_load.HeadLoad.add`.
            guide: a weak model, for which `on_routing` is not called: another pipeline's transformer on the same device,
                or "heads:SHARE", this one with fewer heads. `guide_scale` is the `weak_scale` of `Guidance`.

        Raises:
            FloatingPointError: if images hold NaN or infinity, naming the step.
        """
        guidance = Guidance(
            guidance_scale, guide_channels, tuple(guidance_interval or (0.0, 1.0)), guide_scale
        )
        if (guide is None) != (guide_scale == 1):
            given = "without guide" if guide is None else "with guide"
            raise ValueError(
                f"guide_scale {guide_scale:g} {given}: expected a weak model and a scale other than 1, or neither"
            )
        weak = sampling.weak_predict(self.transformer, guide)
        labels = self._checked_labels(class_labels, guidance).to(self._execution_device)
        self._check_outputs(output_type, callback_on_step_end_tensor_inputs)
        self._check_parts()
        generators = _one_per_image(generator, len(labels))
        scheduler = sampling.fit_scheduler(self.scheduler, self.transformer.config.learn_sigma)
        sampling.set_steps(scheduler, num_inference_steps)
        x = self._first_noise(latents, generators).to(labels.device)
        guided = guidance.around(
            self._predict(on_routing), labels, self.transformer.config.num_classes, weak
        )
        with self.progress_bar(total=len(scheduler.timesteps)) as bar:
            on_step = partial(
                self._after_step, bar, callback_on_step_end, callback_on_step_end_tensor_inputs
            )
            x = sampling.denoise(guided, scheduler, x, generators, on_step)
        if output_type != "latent":
            x = self.decode(x)
            sampling.refuse_not_finite(x, "after decoding")
            x = self.image_processor.postprocess(x, output_type)
        self.maybe_free_model_hooks()
        if not return_dict:
            return (x,)
        return ImagePipelineOutput(images=x)

    def _first_noise(self, latents: Tensor | None, generators: list[torch.Generator]) -> Tensor:
        config = self.transformer.config
        shape = (config.in_channels, config.sample_size, config.sample_size)
        if latents is None:
            return sampling.initial_noise(shape, generators, self._execution_device)
        given = list(getattr(latents, "shape", []))
        dtype = getattr(latents, "dtype", type(latents).__name__)
        expected = [len(generators), *shape]
        if not isinstance(latents, Tensor) or given != expected or not dtype.is_floating_point:
            raise ValueError(
                f"latents are {dtype} {given}: expected floating-point numbers {expected}"
            )
        return latents.float()

    def _predict(self, on_routing: Callable | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        transformer = self.transformer

        def predict(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
            x = x.to(transformer.dtype)
            if on_routing is None:
                return transformer(x, t, y).sample
            out, stats = transformer.forward_routed(x, t, y)
            on_routing(stats, y, t)
            return out

        return predict

    def _after_step(
        self, bar, callback: Callable | None, names: Sequence[str], step: int, t: Tensor, x: Tensor
    ):
        """Count a step; return what the callback gives instead of x, or None.

        Args:
            bar: of tqdm.
            callback, names: `callback_on_step_end` and its inputs.
            step, t, x: as `sampling.denoise` tells them after a step.
        """
        bar.update()
        if callback is None:
            return None
        changed = callback(self, step, t, {name: x for name in names}) or {}
        return changed.get("latents")

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, C, h, w] to images [B, 3, H, W], float32, about -1 .. 1; pixels stay."""
        if self.vae is None:
            return latents
        return decode(self.vae, latents)

    def _check_parts(self) -> None:
        """Refuse a scheduler or a VAE, which users may replace, that does not fit the model."""
        needed = self.config.objective
        given = sampling.objective_of(self.scheduler)
        if given != needed:
            name = f"scheduler {type(self.scheduler).__name__}"
            trained = f"the transformer was trained with objective {needed}"
            fitting = ", ".join(name for name, of in sampling.SAMPLERS.items() if of == needed)
            raise ValueError(
                f"{name} is for objective {given}, {trained}; make_scheduler has {fitting}"
            )
        if self.vae is None:
            return
        try:
            space = LatentSpace.of(self.vae)
        except ValueError as error:
            raise ValueError(f"the VAE: {error}") from None
        channels = self.transformer.config.in_channels
        if space.latent_channels != channels:
            raise ValueError(
                f"the VAE has latents of {space.latent_channels} channels, the transformer works on {channels}"
            )
        trained = self.config.downsampling
        if trained and trained != space.downsampling:
            raise ValueError(
                f"the VAE has {space.downsampling} pixels to the side of a latent, the transformer was trained with {trained}"
            )
        self.register_to_config(downsampling=space.downsampling)

    def _check_outputs(self, output_type: str, callback_inputs: Sequence[str]) -> None:
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"output_type {output_type!r} is not one of {', '.join(OUTPUT_TYPES)}")
        channels = self.transformer.config.in_channels
        if self.vae is None and channels not in (1, 3) and output_type != "latent":
            otherwise = "give the pipeline one, or take output_type 'latent'"
            raise ValueError(f"{channels} channels are no image and there is no VAE; {otherwise}")
        unknown = set(callback_inputs) - set(self._callback_tensor_inputs)
        if unknown:
            raise ValueError(
                f"callback_on_step_end_tensor_inputs {sorted(unknown)}: only 'latents' is known"
            )

    def _checked_labels(self, class_labels: Any, guidance: Guidance) -> Tensor:
        null = self.transformer.config.num_classes
        numbers = class_labels
        if isinstance(class_labels, str):
            numbers = self.get_label_ids(class_labels)
        elif isinstance(class_labels, (list, tuple)):
            numbers = [
                self.get_label_ids(label)[0] if isinstance(label, str) else label
                for label in class_labels
            ]
        labels = torch.as_tensor(numbers).reshape(-1)
        whole = not (labels.is_floating_point() or labels.is_complex())
        if labels.numel() == 0 or not whole or labels.dtype == torch.bool:
            expected = "whole numbers or names of classes, one per image"
            raise ValueError(f"class_labels {class_labels!r}: expected {expected}")
        scale = f"guidance_scale {guidance.scale:g}"
        if guidance.scale != 1 and self.config.label_drop == 0:
            this = "this one was trained with label_drop 0: pass guidance_scale=1"
            raise ValueError(
                f"{scale} needs a model that was trained without some labels too; {this}"
            )
        if guidance.scale != 1 and (labels == null).any():
            raise ValueError(
                f"class_labels {null} means no class, which {scale} cannot guide to: pass guidance_scale=1"
            )
        return labels.long()


def _one_per_image(generator: Any, images: int) -> list[torch.Generator]:
    if isinstance(generator, (list, tuple)):
        if len(generator) != images:
            raise ValueError(
                f"generator lists {len(generator)} generators for {images} images: one per image, or one"
            )
        return list(generator)
    device = "cpu"
    if generator is not None:
        device = generator.device
    # One draw at a time: that of image i then does not depend on how many follow.
    seeds = [
        torch.randint(2**63 - 1, (), generator=generator, device=device).item()
        for _ in range(images)
    ]
    return [torch.Generator().manual_seed(seed) for seed in seeds]
