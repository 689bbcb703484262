import weakref

import pytest
import torch

from moh_vision.evaluation.accuracy import evaluate, summary
from moh_vision.evaluation.classifier_scores import score_with_classifier
from moh_vision.evaluation.fidelity.metrics import frechet_distance


def test_accuracy_counts_every_sample_once_over_ranks():
    logits = torch.randn(23, 7)
    labels = torch.randint(0, 7, (23,))
    sums = []

    def predict(images, asked):
        return logits[images], asked

    def kept(rank_sums):
        sums.append(rank_sums)
        return rank_sums

    for rank in range(3):
        parts = torch.arange(rank, 23, 3).split(4)
        batches = [dict(images=part, labels=labels[part]) for part in parts]
        evaluate(predict, batches, "cpu", kept)
    scores = evaluate(predict, [], "cpu", lambda _: sum(sums))
    hits = logits.topk(5).indices == labels[:, None]
    top1, top5 = (100 * hits[:, :k].any(1).double().mean().item() for k in (1, 5))
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    expected = dict(top1=top1, top5=top5, loss=loss, images=23)
    # Further scores may be added.
    assert {name: scores[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("classes, shown", [(5, False), (6, True)])
def test_top_5_of_five_classes_is_not_told(classes, shown):
    """It is 100 % whatever the model does."""
    logits = torch.randn(20, classes)
    labels = torch.randint(0, classes, (20,))
    batches = [dict(images=logits, labels=labels)]
    scores = evaluate(lambda *both: both, batches, "cpu", lambda sums: sums)
    assert ("top5" in scores) == shown
    line = summary(dict(scores, unreadable=0, images_per_s=1.0, peak_memory_mib=1))
    assert ("top-5" in line) == shown and f"top-1 {scores['top1']:.2f} %" in line


class Brightest(torch.nn.Module):
    """Features are the three channel means, the class is the brightest."""

    def forward_features(self, x):
        return x.mean((2, 3))

    def forward_head(self, x, pre_logits=False):
        assert pre_logits
        return x

    def get_classifier(self):
        return torch.nn.Identity()


def test_score_with_classifier():
    def images(labels):
        x = torch.rand(len(labels), 3, 4, 4)
        x[torch.arange(len(labels)), labels] += 2
        return x

    labels = torch.arange(300) % 3
    asked = torch.arange(300) % 3
    asked[:30] = (asked[:30] + 1) % 3
    reference = [dict(images=images(part), labels=part) for part in labels.split(100)]
    fake = images(labels)
    batches = [dict(images=x, labels=y) for x, y in zip(fake.split(70), asked.split(70))]
    scores = score_with_classifier(Brightest(), iter(batches), iter(reference), "cpu")
    assert scores["recognised"] == pytest.approx(0.9)
    assert scores["recognised_real"] == 1.0
    features = (
        x.mean((2, 3)).double() for x in (fake, torch.cat([b["images"] for b in reference]))
    )
    want = frechet_distance(*(moment for x in features for moment in (x.mean(0), x.T.cov())))
    assert scores["frechet_distance"] == pytest.approx(want) and 0 < want < 0.01
    assert scores["num_generated"] == 300
    assert scores["num_reference"] == 300
    assert scores["num_features"] == 3
    few = [dict(images=fake[:3], labels=asked[:3])]
    assert score_with_classifier(Brightest(), few, reference, "cpu")["frechet_distance"] is None


def test_no_images_are_kept_by_the_scores_of_a_classifier():
    """At most a few batches are alive at a time."""
    alive = weakref.WeakSet()

    def batches():
        for _ in range(100):
            images = torch.rand(100, 3, 4, 4)
            alive.add(images)
            assert len(alive) < 5
            yield dict(images=images, labels=torch.zeros(100, dtype=torch.long))

    assert (
        score_with_classifier(Brightest(), batches(), batches(), "cpu")["num_generated"] == 10_000
    )
