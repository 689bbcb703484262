import numpy as np
import torch

from moh_vision.data.sources import Digits
from moh_vision.diffusion.batches import NoisedImages, cropped
from moh_vision.diffusion.objectives import draw_step


def test_diffusion_draws():
    source = Digits("train")
    data = NoisedImages(source, cropped("none", 8, 1), 0, draw_step, label_drop=0.25, noise_shape=(1, 8, 8))
    items = [data[(p, p % len(source))] for p in range(2000)]
    assert torch.equal(data[(5, 5)]["noise"], items[5]["noise"])
    noise = torch.stack([i["noise"] for i in items])
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 1) < 0.01
    dropped = np.mean([i["labels"] == 10 for i in items])
    assert 0.2 < dropped < 0.3
    steps = np.array([i["timesteps"] for i in items])
    assert steps.min() >= 0 and steps.max() <= 999 and 470 < steps.mean() < 530
