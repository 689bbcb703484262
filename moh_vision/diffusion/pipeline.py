"""The DiT pipeline: class labels in, images out. Saved pipelines name this module, so it never moves.

We do not use diffusers' DiTPipeline: it takes 1000 for "no class", drops the learned variance, and does not pass the
generator to the scheduler.
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

# diffusers needs the imports of flow_ode and flow_sde: it finds schedulers only in modules that are imported.
from moh_vision.diffusion import flow_ode, flow_sde, sampling, schedulers  # noqa: F401
from moh_vision.diffusion.config import class_numbers
from moh_vision.diffusion.latents.vae import LatentSpace, decode
from moh_vision.diffusion.sampling import Guidance
from moh_vision.models.dit_caches import BROADCAST, FIRST_BLOCK, TAYLOR
from moh_vision.models.dit_transformer import MoHDiTTransformer2DModel, from_diffusers

OUTPUT_TYPES = ("pil", "np", "pt", "latent")


class MoHDiTPipeline(DiffusionPipeline):
    """Class-conditional sampling from a DiT, dense or with head routing, on pixels or on a VAE's latents.

    Users may set `scheduler` to one made by `moh_vision.diffusion.make_scheduler`, or to another of diffusers'
    schedulers made with `from_config`. `from_pretrained` also reads a folder of diffusers' DiTPipeline.

    Args:
        transformer: a `moh_vision.models.dit_transformer.MoHDiTTransformer2DModel`, or diffusers' DiT, which is
            converted with equal outputs. Its config.num_classes is the label that means "no class".
        scheduler: of diffusers, for what the transformer predicts, see `Prediction`.
        vae: decodes latents, which its config says how to scale, see `LatentSpace`; None: the transformer works
            on pixels in [-1, 1].
        id2label: names of the classes, by number.
        label_drop: share of labels that training replaced by "no class"; with 0, guidance is refused.
        downsampling: pixels per side of a latent; None: the VAE's. A VAE that is set later must have the same.
    """

    model_cpu_offload_seq = "transformer->vae"
    _optional_components = ["vae"]
    _callback_tensor_inputs = ["latents"]
    current_timestep: float | None = None  # of the pass that is made, for PyramidAttentionBroadcast

    def __init__(
        self,
        transformer: ModelMixin,
        scheduler: SchedulerMixin,
        vae: ModelMixin | None = None,
        id2label: dict | None = None,
        label_drop: float | None = None,
        downsampling: int | None = None,
    ):
        super().__init__()
        # Compare the name of the class: importing the class takes a second.
        if type(transformer).__name__ == "DiTTransformer2DModel":
            transformer = from_diffusers(transformer)
        if not isinstance(transformer, MoHDiTTransformer2DModel):
            raise ValueError(
                f"the transformer is a {type(transformer).__name__}, expected a DiT of moh_vision or diffusers"
            )
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)
        if id2label is not None:  # keys are strings in JSON
            id2label = {str(number): name for number, name in id2label.items()}
        self.register_to_config(id2label=id2label, label_drop=label_drop, downsampling=downsampling)
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
        """Return the class number for each label: a name, a word of an ImageNet name, or a number as text."""
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
        graphs: Callable[..., Tensor] | None = None,
    ) -> ImagePipelineOutput | tuple:
        """Draw one image per label.

        Args:
            class_labels: B class numbers or names. The number num_classes (0 for a model without classes) draws
                without a class; it needs guidance_scale 1.
            guidance_scale, guide_channels, guidance_interval: see `moh_vision.diffusion.Guidance`.
            num_inference_steps: steps of the scheduler; without effect for "dopri5", which chooses its own.
            generator: one generator per image, for all noise of that image; or a single one (None: torch's default),
                from which each image in turn draws a seed, so that image i does not depend on how many follow. Equal
                noise gives equal bits at equal batch size.
            latents: initial noise, N(0, 1) [B, C, h, w], whatever the model's noise_scale; None: draw it with `generator`. Noise of later
                steps always comes from `generator`.
            output_type: "pil", "np" [B, H, W, C] or "pt" [B, C, H, W] in 0 .. 1, or "latent": not decoded.
            return_dict: return an `ImagePipelineOutput`; False: a tuple.
            callback_on_step_end: (pipeline, step, timestep, dict(latents=...)) -> dict of new latents, or None.
            callback_on_step_end_tensor_inputs: keys of the dict that the callback gets; only "latents" is known.
            on_routing: called after each pass with arguments of `moh_vision.models.head_load.HeadLoad.add`, but not
                after passes of the weak model.
            guide: the weak model: another pipeline's transformer on the same device, or "heads:SHARE" for this
                transformer with fewer heads.
            guide_scale: the `weak_scale` of `Guidance`.
            graphs: a `moh_vision.diffusion.prediction_graphs.PredictionGraphs`, which makes predictions as CUDA graphs and
                keeps them for later calls; without effect with on_routing.

        Raises:
            FloatingPointError: if images hold NaN or infinity; the message names the step.
        """
        guidance = Guidance(
            guidance_scale, guide_channels, tuple(guidance_interval or (0.0, 1.0)), guide_scale
        )
        if (guide is None) != (guide_scale == 1):
            given = "without guide" if guide is None else "with guide"
            raise ValueError(
                f"guide_scale {guide_scale:g} {given}: expected a weak model and a scale other than 1, or neither"
            )
        weak_call = sampling.within_cache(graphs or sampling.predicted, "weak")
        weak = sampling.weak_predict(self.transformer, guide, call=weak_call)
        labels = self._checked_labels(class_labels, guidance).to(self._execution_device)
        self._check_outputs(output_type, callback_on_step_end_tensor_inputs)
        self._check_parts()
        generators = _one_per_image(generator, len(labels))
        scheduler = schedulers.fit_scheduler(self.scheduler, self.transformer.config.learn_sigma)
        schedulers.set_steps(scheduler, num_inference_steps)
        for model in (self.transformer, guide):
            self.check_tools(model, guide, scheduler, graphs)
        call = sampling.within_cache(graphs or sampling.predicted, "model")
        x = self._first_noise(latents, generators).to(labels.device)
        guided = guidance.around(
            self._predict(on_routing, call), labels, self.transformer.config.num_classes, weak
        )

        def guided_at(x: Tensor, t: Tensor) -> Tensor:
            self.current_timestep = t.item()
            return guided(x, t)

        with self._step_bar(schedulers.step_count(scheduler)) as bar:
            on_step = partial(
                self._after_step, bar, callback_on_step_end, callback_on_step_end_tensor_inputs
            )
            noise_scale = self.transformer.prediction.noise_scale
            x = sampling.denoise(guided_at, scheduler, x, generators, on_step, noise_scale)
        if output_type != "latent":
            x = self.decode(x)
            sampling.refuse_not_finite(x, "after decoding")
            x = self.image_processor.postprocess(x, output_type)
        self.maybe_free_model_hooks()
        if not return_dict:
            return (x,)
        return ImagePipelineOutput(images=x)

    def _first_noise(self, latents: Tensor | None, generators: list[torch.Generator]) -> Tensor:
        """Return the initial noise [B, C, h, w]: drawn, or the checked `latents` in float32."""
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

    def _predict(
        self, on_routing: Callable | None, call: Callable[..., Tensor]
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return the transformer as a function of (x, t, labels) that reports routing to `on_routing`.

        call: calls the transformer where nothing is reported.
        """
        transformer = self.transformer
        if on_routing is None:
            return partial(call, transformer)

        def predict(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
            out, stats = transformer.forward_routed(x.to(transformer.dtype), t, y)
            on_routing(stats, y, t)
            return out

        return predict

    def _step_bar(self, steps: int | None):
        """Return a progress bar of diffusers; `steps` None: of an unknown number of steps."""
        if steps is None:
            return self.progress_bar(iter(()))  # diffusers asks for a total or an iterable
        return self.progress_bar(total=steps)

    def _after_step(
        self, bar, callback: Callable | None, names: Sequence[str], step: int, t: Tensor, x: Tensor
    ):
        """Advance the progress bar; return the callback's new latents, or None.

        Args:
            bar: tqdm's progress bar.
            callback, names: `callback_on_step_end` and its inputs.
            step, t, x: what `sampling.denoise` passes to `on_step`.
        """
        bar.update()
        if callback is None:
            return None
        changed = callback(self, step, t, {name: x for name in names}) or {}
        return changed.get("latents")

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, C, h, w] to images [B, 3, H, W], float32, in about -1 .. 1; return pixels unchanged."""
        if self.vae is None:
            return latents
        return decode(self.vae, latents)

    def _check_parts(self) -> None:
        """Refuse a scheduler or a VAE that does not fit the transformer; users may have replaced them."""
        problem = schedulers.why_unfit(self.scheduler, self.transformer.prediction)
        if problem:
            raise ValueError(problem)
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

    def check_tools(
        self,
        model: Any,
        guide: str | ModelMixin | None,
        scheduler: SchedulerMixin,
        graphs: Callable[..., Tensor] | None,
    ) -> None:
        """Refuse a cache or an adapter in a model, the transformer or its guide, that cannot work in this sampling."""
        if graphs is not None and isinstance(model, MoHDiTTransformer2DModel):
            model.refuse_adapters("graphs: a graph goes on with the adapters of its capture")
        if not getattr(model, "is_cache_enabled", False):
            return
        name = type(model._cache_config).__name__
        if graphs is not None:
            raise ValueError(
                f"graphs: a graph replays all blocks, and {name} decides in each step which blocks run; call disable_cache() "
                "or give no graphs"
            )
        one_pass_a_step = schedulers.step_count(scheduler) is not None and scheduler.order == 1
        if name == TAYLOR and not one_pass_a_step:
            raise ValueError(
                f"{name} takes passes for steps of one length, and {type(scheduler).__name__} makes passes at other times: "
                f"{FIRST_BLOCK} works"
            )

        if name == BROADCAST and isinstance(guide, str):
            raise ValueError(
                f"guide {guide!r} makes a second prediction with the same layers, of which {name} keeps one output each: "
                f"{FIRST_BLOCK} works"
            )

    def _check_outputs(self, output_type: str, callback_inputs: Sequence[str]) -> None:
        """Refuse an output type or a callback input that this pipeline does not have."""
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
        """Return class numbers [B], int64, of the names or numbers that `__call__` was given."""
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
        is_integer = not (
            labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool
        )
        if labels.numel() == 0 or not is_integer:
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
    """Return one generator per image: the given ones, or new ones with seeds drawn from the given one."""
    if isinstance(generator, (list, tuple)):
        if len(generator) != images:
            raise ValueError(
                f"generator lists {len(generator)} generators for {images} images: one per image, or one"
            )
        return list(generator)
    device = "cpu"
    if generator is not None:
        device = generator.device
    # Draw the seeds one at a time, so that the seed of image i does not depend on how many images follow.
    seeds = [
        torch.randint(2**63 - 1, (), generator=generator, device=device).item()
        for _ in range(images)
    ]
    return [torch.Generator().manual_seed(seed) for seed in seeds]
