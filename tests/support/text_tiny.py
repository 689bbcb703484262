"""Text models small enough for tests: width 32, two layers, 40 words, and large random weights."""

import torch

from moh_vision.attention.routers.gate_norm import GateNorm
from moh_vision.language.models.create import create_text_model

VOCAB = 40
ATTENTIONS = {
    "dense": {"router": "dense"},
    "gated": {"router": "gated"},
    "mae_7": {"router": "mae", "leave_out": 1},
    "mae_6": {"router": "mae", "leave_out": 2},
    "uni_mae": {"router": "mae", "mode": "uniform"},
    "moa": {"router": "moa", "top_k": 2, "experts": 5, "head_dim": 6, "bias": False},
    "moa_bias": {"router": "moa", "top_k": 2, "experts": 5, "head_dim": 6, "bias": True},
    "moh": {"router": "moh", "head_budget": 0.5},
    "query_norm": {"router": "query_norm", "head_budget": 0.5},
}
TINY = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=4, dropout=0.0
)
TINY.update(attention_dropout=0.0, activation_dropout=0.0)
DEPTH = {
    "mt_transformer_base": dict(encoder_layers=2, decoder_layers=2),
    "mlm_base": dict(num_hidden_layers=2, max_position_embeddings=20),
    "clm_wt103_base": dict(
        num_hidden_layers=2, adaptive_cutoffs=[10, 25], adaptive_factor=2, adaptive_dropout=0.0
    ),
}


def tiny(preset, attention="dense", seed=0, dtype=torch.float64, **overrides):
    """Return a tiny model of a preset; `attention` is a name in `ATTENTIONS` or a dict as its values."""
    torch.manual_seed(seed)
    spec = ATTENTIONS[attention] if isinstance(attention, str) else attention
    fields = {**TINY, **DEPTH[preset], "attention": spec, **overrides}
    model = create_text_model(preset, **fields).to(dtype).eval()
    stir(model)
    return model


def stir(model):
    """Draw weights so large that routers choose different heads for different tokens, and beam search swaps beams."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(std=0.3)
        for module in model.modules():
            if isinstance(module, GateNorm):
                module.running_mean.normal_(std=0.3)
                module.running_var.uniform_(0.05, 0.3)


def words(rows, length, seed=1):
    """Return random tokens [rows, length], none of them special."""
    return torch.randint(5, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def empty(preset, **overrides):
    """Return a model on the meta device, without weights."""
    with torch.device("meta"):
        return create_text_model(preset, **overrides)
