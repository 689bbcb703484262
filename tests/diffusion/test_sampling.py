import pytest
import torch

from moh_vision.diffusion import make_scheduler, sample_images
from moh_vision.diffusion.sampling import to_uint8

ALPHA_BAR = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0)
SHAPE = (2, 3, 3)


def points(*values):
    """A model that knows the data: class c is the single image filled with values[c]."""
    table = torch.tensor(values)

    def predict(x, t, labels):
        a = ALPHA_BAR[t].float().view(-1, 1, 1, 1)
        eps = (x - a.sqrt() * table[labels].view(-1, 1, 1, 1)) / (1 - a).sqrt()
        return torch.cat([eps, -torch.ones_like(eps)], dim=1)

    return predict


@pytest.mark.parametrize("sampler, steps", [("ddpm", 1000), ("ddpm", 50), ("ddim", 50), ("ddim", 10)])
@pytest.mark.parametrize("learned", [True, False])
def test_the_exact_model_gives_back_the_data(sampler, steps, learned):
    scheduler = make_scheduler(sampler, steps, learned, clip=False)
    labels = torch.tensor([0, 1, 2])
    images = sample_images(points(-0.5, 0.0, 0.7, 0.0), scheduler, labels, SHAPE, [1, 2, 3], null_label=3)
    want = torch.tensor([-0.5, 0.0, 0.7]).view(3, 1, 1, 1).expand_as(images)
    torch.testing.assert_close(images, want, atol=0.03, rtol=0)


@pytest.mark.parametrize("guidance", [0.0, 1.5, 3.0])
def test_guidance_extrapolates_from_no_class(guidance):
    scheduler = make_scheduler("ddim", 20, True, clip=False)
    images = sample_images(points(0.2, -0.1), scheduler, torch.tensor([0]), SHAPE, [1], null_label=1, guidance=guidance)
    torch.testing.assert_close(images, torch.full_like(images, -0.1 + guidance * 0.3), atol=1e-2, rtol=0)


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
def test_an_image_depends_on_its_seed_alone(sampler):
    def smooth(x, t, labels):  # elementwise, so that batch size cannot change its rounding
        return torch.cat([x * 0.9, x * 0.0], dim=1)

    def run(seeds):
        scheduler = make_scheduler(sampler, 10, True, clip=True)
        return sample_images(smooth, scheduler, torch.zeros(len(seeds), dtype=torch.long), SHAPE, seeds, 1)

    together, alone = run([5, 6, 7]), run([6])
    assert torch.equal(together[1], alone[0])
    assert not torch.equal(together[0], together[1])
    assert torch.equal(run([5, 6, 7]), together)


def test_half_the_work_without_guidance():
    sizes = []

    def predict(x, t, labels):
        sizes.append(len(x))
        return torch.zeros(len(x), 4, 3, 3)

    for guidance in (1.0, 2.0):
        sample_images(predict, make_scheduler("ddim", 1, True, False), torch.tensor([0, 0]), SHAPE, [1, 2], 1, guidance)
    assert sizes == [2, 4]


def test_the_official_step_sets():
    assert make_scheduler("ddim", 50, True, False).timesteps.tolist() == list(range(980, -1, -20))
    steps = make_scheduler("ddpm", 250, True, False).timesteps.tolist()
    assert (len(steps), steps[0], steps[-1]) == (250, 999, 0)


@pytest.mark.parametrize(
    "sampler, steps, words",
    [
        ("euler", 5, "sampler 'euler' is not one of ddpm, ddim"),
        ("ddim", 0, "steps 0 is out of range"),
        ("ddim", 1001, "1 to 1000"),
    ],
)
def test_bad_arguments(sampler, steps, words):
    with pytest.raises(ValueError, match=words):
        make_scheduler(sampler, steps, True, False)


def test_to_uint8():
    assert to_uint8(torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])).tolist() == [0, 0, 128, 255, 255]
