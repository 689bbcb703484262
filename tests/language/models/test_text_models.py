"""Text models against plain rewrites: what they compute, what they must not see, the losses per token."""

import math

import pytest
import torch
from torch.nn import functional as F

from moh_vision.attention import attention_layers
from tests.support.refusals import refuse
from tests.support.text_tiny import ATTENTIONS, VOCAB, tiny, words

ROUTED = sorted(ATTENTIONS)


def attend(layer, x, context, allowed, heads=4):
    """Multi-head attention in plain torch with the weights of a dense layer; allowed [B or 1, N, M]."""
    width = x.shape[-1] // heads
    q_w, k_w, v_w = layer.qkv.weight.chunk(3)
    q_b, k_b, v_b = layer.qkv.bias.chunk(3)
    q = x @ q_w.T + q_b
    k = context @ k_w.T + k_b
    v = context @ v_w.T + v_b
    parts = []
    for h in range(heads):
        at = slice(h * width, (h + 1) * width)
        scores = q[..., at] @ k[..., at].transpose(1, 2) / math.sqrt(width)
        parts.append(scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v[..., at])
    return torch.cat(parts, -1) @ layer.proj.weight.T + layer.proj.bias


def norm(layer, x):
    mean = x.mean(-1, keepdim=True)
    var = x.var(-1, keepdim=True, unbiased=False)
    return (x - mean) / (var + 1e-5).sqrt() * layer.weight + layer.bias


def position_table(length, dim):
    table = torch.zeros(length, dim, dtype=torch.float64)
    for p in range(length):
        for i in range(dim // 2):
            angle = p / 10_000 ** (i / (dim // 2 - 1))
            table[p, i] = math.sin(angle)
            table[p, dim // 2 + i] = math.cos(angle)
    return table


def feed_forward(ffn, x, activation=torch.relu):
    return activation(x @ ffn.inner.weight.T + ffn.inner.bias) @ ffn.outer.weight.T + ffn.outer.bias


def encoded(layers, x, allowed, activation=torch.relu):
    """The output of post-normalised layers of an encoder."""
    for layer in layers:
        x = norm(layer.self_norm, x + attend(layer.self_attn, x, x, allowed))
        x = norm(layer.ffn_norm, x + feed_forward(layer.ffn, x, activation))
    return x


def test_the_dense_translation_model_is_the_transformer():
    model = tiny("mt_transformer_base")
    source = words(2, 7)
    target = words(2, 5, seed=2)
    real = torch.ones(2, 7, dtype=torch.bool)
    real[1, 4:] = False
    table = model.encoder.embedding.weight
    x = table[source] * math.sqrt(32) + position_table(7, 32)
    x = encoded(model.encoder.layers, x, real[:, None] | torch.eye(7, dtype=torch.bool))
    y = table[target] * math.sqrt(32) + position_table(5, 32)
    for layer in model.decoder.layers:
        y = norm(layer.self_norm, y + attend(layer.self_attn, y, y, torch.ones(1, 5, 5).tril() > 0))
        y = norm(layer.cross_norm, y + attend(layer.cross_attn, y, x, real[:, None]))
        y = norm(layer.ffn_norm, y + feed_forward(layer.ffn, y))
    expected = (y @ table.T).log_softmax(-1)
    out = model(input_ids=source, attention_mask=real.long(), decoder_input_ids=target)
    # Padded rows of the encoder differ (they see all here), and no one reads them. Positions are float32 in the model.
    torch.testing.assert_close(out.logits, expected, rtol=0, atol=1e-4)


def test_the_dense_masked_language_model_is_roberta():
    model = tiny("mlm_base")
    ids = words(2, 6)
    x = norm(model.embedding_norm, model.embedding.weight[ids] + model.positions.weight[:6])
    x = encoded(model.layers, x, torch.ones(1, 6, 6, dtype=torch.bool), F.gelu)
    x = norm(model.head_norm, F.gelu(x @ model.head.weight.T + model.head.bias))
    expected = (x @ model.embedding.weight.T + model.output.bias).log_softmax(-1)
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-9)
    refuse("21 max_position_embeddings=20", model, words(1, 21))


def test_the_dense_causal_language_model_normalises_before():
    model = tiny("clm_wt103_base", adaptive_cutoffs=[])
    ids = words(2, 6)
    table = model.vocabulary.embeddings[0].weight
    x = table[ids] * math.sqrt(32) + position_table(6, 32)
    for layer in model.layers:
        y = norm(layer.self_norm, x)
        x = x + attend(layer.self_attn, y, y, torch.ones(1, 6, 6).tril() > 0)
        x = x + feed_forward(layer.ffn, norm(layer.ffn_norm, x))
    torch.testing.assert_close(model(ids).logits, (x @ table.T).log_softmax(-1), rtol=0, atol=1e-4)


def test_expert_biases_are_weighed_like_their_experts():
    layer = attention_layers(tiny("mlm_base", "moa_bias"))[0]
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    y, _ = layer(x)
    p = (x @ layer.router.gate.weight.T).softmax(-1)
    q = x @ layer.qkv.weight[:30].T + layer.qkv.bias[:30]
    k, v = (x @ layer.qkv.weight[30:].T + layer.qkv.bias[30:]).split(6, dim=-1)
    expected = torch.zeros_like(y)
    for b in range(2):
        for n in range(6):
            best = p[b, n].topk(2).indices
            for e in best:
                at = slice(6 * e, 6 * e + 6)
                o = (q[b, n, at] @ k[b].T / math.sqrt(6)).softmax(-1) @ v[b]
                weight = p[b, n, e] / p[b, n, best].sum()
                expected[b, n] += weight * (layer.proj.weight[:, at] @ o + layer.head_bias[e])
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("bias", [False, True])
def test_noisy_gates_of_moa(bias):
    """Zhang 2022, eq. 3: other experts from call to call in training, none without; an expert's bias goes with it."""
    spec = {"router": "moa", "top_k": 2, "experts": 5, "head_dim": 6, "bias": bias, "noisy": True}
    model = tiny("mlm_base", attention=spec)
    layer = attention_layers(model)[0]
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    assert torch.equal(layer(x)[0], layer(x)[0])
    layer.train()
    assert not torch.equal(layer(x)[0], layer(x)[0])
    if bias:  # the output is then the weights themselves
        with torch.no_grad():
            layer.proj.weight.zero_()
            layer.head_bias.copy_(torch.eye(5, 32))
        y, stats = layer(x)
        assert torch.equal((y[..., :5] > 0).sum((0, 1)).double(), stats.counts.sum(0).double())
    y, _ = layer(x)
    y.square().sum().backward()
    assert layer.router.noise.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("attention", ROUTED)
def test_decoders_see_no_later_token(attention, train):
    source = words(2, 6)
    early = words(2, 9, seed=2)
    late = words(2, 9, seed=3)
    late[:, :5] = early[:, :5]
    for preset, target_key, inputs in (
        ("clm_wt103_base", "input_ids", {}),
        ("mt_transformer_base", "decoder_input_ids", {"input_ids": source}),
    ):
        logits = []
        for target in (early, late):
            # A model for each: in training the gates' batch norms move.
            model = tiny(preset, attention).train(train)
            for layer in attention_layers(model):
                if getattr(layer.router, "out", None) is not None:
                    layer.router.set_mode("soft")  # drawn experts would differ by chance
                    layer.router.dropout.p = 0.0
            inputs[target_key] = target
            logits.append(model(**inputs).logits)
        torch.testing.assert_close(logits[0][:, :5], logits[1][:, :5], rtol=0, atol=1e-12)
        assert not torch.allclose(logits[0][:, 5:], logits[1][:, 5:], atol=1e-3)


@pytest.mark.parametrize("attention", ROUTED)
def test_padding_changes_nothing(attention):
    lengths = [7, 4, 2]
    target_lengths = [3, 6, 5]
    mask = (torch.arange(7) < torch.tensor(lengths)[:, None]).long()
    target_mask = torch.arange(6) < torch.tensor(target_lengths)[:, None]
    source = words(3, 7) * mask
    target = words(3, 6, seed=2) * target_mask
    model, encoder, causal = (
        tiny(preset, attention) for preset in ("mt_transformer_base", "mlm_base", "clm_wt103_base")
    )
    together = model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    masked = encoder(source, mask).logits
    right = causal(source, mask).logits
    left_ids = torch.stack([row.roll(7 - n) for row, n in zip(source, lengths)])
    left_mask = torch.stack([row.roll(7 - n) for row, n in zip(mask, lengths)])
    left = causal(left_ids, left_mask).logits
    for b, (n, t) in enumerate(zip(lengths, target_lengths)):
        ids = source[b : b + 1, :n]
        translated = model(input_ids=ids, decoder_input_ids=target[b : b + 1, :t]).logits[0]
        alone = causal(ids).logits[0]
        pairs = [(together[b, :t], translated), (masked[b, :n], encoder(ids).logits[0])]
        for got, want in [*pairs, (right[b, :n], alone), (left[b, 7 - n :], alone)]:
            torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("preset", ["mt_transformer_base", "mlm_base", "clm_wt103_base"])
def test_losses_per_token(preset, smoothing):
    options = dict(adaptive_cutoffs=[]) if "clm" in preset else {}
    model = tiny(preset, "moa", dtype=torch.float32, **options)
    labels = words(3, 6, seed=4)
    labels[0, 2:] = -100
    inputs = {"input_ids": words(3, 6), "attention_mask": torch.ones(3, 6, dtype=torch.long)}
    if "mt" in preset:
        inputs["decoder_input_ids"] = words(3, 6, seed=5)
    loss, nll, stats = model.routed_loss(labels, label_smoothing=smoothing, **inputs)
    logits, again = model.forward_routed(**inputs)
    expected = F.cross_entropy(
        logits.transpose(1, 2), labels, reduction="none", label_smoothing=smoothing
    )
    torch.testing.assert_close(loss, expected)
    plain = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(nll, plain)
    assert loss.dtype == nll.dtype == torch.float32
    assert (loss[0, 2:] == 0).all() and (nll[0, 2:] == 0).all()
    assert len(stats) == len(again) == len(attention_layers(model))


def test_statistics_come_in_the_order_of_the_modules_and_leave_padding_out():
    attentions = [{"router": "moa", "top_k": 1, "experts": e, "head_dim": 4} for e in (2, 3, 5)]
    names = ("encoder_attention", "decoder_attention", "cross_attention")
    model = tiny("mt_transformer_base", **dict(zip(names, attentions)))
    source = words(2, 7)
    target = words(2, 6, seed=2)
    source[1, 4:] = 0
    target[0, 2:] = 0
    _, stats = model.forward_routed(
        input_ids=source, attention_mask=source != 0, decoder_input_ids=target
    )
    heads = [layer.budget.heads for layer in attention_layers(model)]
    assert [s.probs.shape[-1] for s in stats] == heads
    assert [s.probs.shape[-1] for s in stats] == [2, 2, 3, 5, 3, 5]
    assert [s.counts.sum(1).tolist() for s in stats] == [[7, 4]] * 2 + [[2, 6]] * 4


def test_labels_as_transformers_has_them():
    model = tiny("clm_wt103_base")
    ids = words(2, 6)
    expected = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(model(ids, labels=ids).loss, expected)
    translation = tiny("mt_transformer_base")
    labels = words(2, 5, seed=3)
    labels[1, 3:] = -100
    shifted = torch.tensor([[1, *labels[0, :-1]], [1, *labels[1, :3], 0]])
    assert torch.equal(translation.prepare_decoder_input_ids_from_labels(labels), shifted)
    out = translation(input_ids=ids, labels=labels)
    logits = translation(input_ids=ids, decoder_input_ids=shifted).logits
    torch.testing.assert_close(out.loss, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


@pytest.mark.parametrize("preset", ["mt_transformer_base", "mlm_base", "clm_wt103_base"])
@pytest.mark.parametrize("attention", ["moa", "mae_7"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_activation_checkpointing_leaves_gradients_equal(preset, attention, reentrant):
    grads = []
    for checkpointing in (False, True):
        model = tiny(preset, attention).train()
        torch.manual_seed(0)  # dropout of the gates
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        inputs = {"input_ids": words(2, 6)}
        if "mt" in preset:
            inputs["decoder_input_ids"] = words(2, 6, seed=5)
        loss, _, stats = model.routed_loss(words(2, 6, seed=4), **inputs)
        (loss.mean() + sum(s.probs.square().mean() for s in stats)).backward()
        grads.append([p.grad for p in model.parameters()])
    for plain, spared in zip(*grads):
        assert plain is not None
        torch.testing.assert_close(spared, plain, rtol=0, atol=1e-12)


def test_loss_of_separate_vocabularies():
    model = tiny("mt_transformer_base", target_vocab_size=12)
    assert model.encoder.embedding.weight.shape == (VOCAB, 32)
    assert model.output.weight is model.decoder.embedding.weight
    assert model.output.weight.shape == (12, 32)
    target = torch.randint(5, 12, (2, 4))
    assert model(input_ids=words(2, 5), decoder_input_ids=target).logits.shape == (2, 4, 12)
