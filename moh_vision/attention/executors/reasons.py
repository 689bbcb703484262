"""Why executors cannot run a call: what they say, and the checks that several of them share in `Executor.why_not`.

Each check returns one of the reasons below, or "".
"""

from moh_vision.attention import kernels
from moh_vision.attention.executors.signature import Signature
from moh_vision.attention.kernels.contract import DTYPES

# Of the call.
EVERY_HEAD = "every head may run"
NO_TOKENS = "there are no tokens"
ALL_KEYS_CACHED = "the keys of all heads are cached"
CHOSEN_PER_TOKEN = "needs heads that are chosen per sequence"
KEYS_NOT_PER_HEAD = "keys are cached, or shared by groups of heads"
HIDDEN_WEIGHTS = "the projections carry hooks or are not plain linear layers"
SLICED_IS_FASTER = (
    "one choice serves all sequences, which plain products by a smaller weight do faster"
)
QUERIES_ARE_MADE = "compiled, or the router has projected the queries"
PAIRS_VARY = "compiled, and the list of pairs has no fixed length"
HEADS_VARY = "compiled, and the number of heads varies"
GROUPS_VARY = "compiled, and the number of groups varies"
# Of the operators.
NO_OPERATOR = "no compiled operator runs the call"  # `no_operator` adds what is in the way
NO_PRODUCTS = "no C++ operator projects such numbers"
PRODUCTS_ARE_SKIPPED_TOO = "in float32 the C++ operators leave out products too"
NO_LOOK_UP = "no Triton kernel projects such numbers, or gradients are recorded, which other products do faster"
HALF_EMPTY_TILES = (
    "tiles of 128 tokens would be half empty, and products with the whole weight are faster"
)
NOT_ONE_PRODUCT = "queries, keys and values are not one product"


def nothing_to_skip(signature: Signature) -> str:
    """Return why no executor can skip heads of a call."""
    s = signature
    if s.all_heads:
        return EVERY_HEAD
    if 0 in (s.batch, s.tokens, s.keys, s.dim):
        return NO_TOKENS
    # A prompt in inference is not refused: each of its tokens runs its own heads, and the cache gets the keys of all heads.
    cached = s.cache == "tokens" and (s.tokens == 1 or s.trains())
    if cached or s.cache == "context":
        return ALL_KEYS_CACHED
    return ""


def not_whole_heads(signature: Signature) -> str:
    """Return why heads cannot be left out of whole sequences, keys and values included."""
    s = signature
    if s.choice == "token":
        return CHOSEN_PER_TOKEN
    if s.cache or s.kv_heads < s.heads:
        return KEYS_NOT_PER_HEAD
    return hidden_weights(s)


def hidden_weights(signature: Signature) -> str:
    """Return why the weights of the projections may not be read."""
    if signature.readable:
        return ""
    return HIDDEN_WEIGHTS


def no_operator(signature: Signature) -> str:
    """Return why neither C++ nor Triton has an operator for the attention of a call."""
    if path_of(signature) != "torch":
        return ""
    reason = "dropout"
    if not signature.dropout:
        reason = kernels.about(signature.device.type)
    return f"{NO_OPERATOR} ({reason})"


def no_products(signature: Signature) -> str:
    """Return why the C++ operators that skip products (`project`, `attend`, `combine`) cannot run a call."""
    if has_products(signature):
        return ""
    return NO_PRODUCTS


def has_products(signature: Signature) -> bool:
    """Return whether the C++ operators that skip products have the device and dtype of a call."""
    return signature.mode != "traced" and kernels.native(signature.device, signature.dtype)


def unlisted(signature: Signature) -> str:
    """Return why the pairs of a call cannot be listed on a CPU. Under torch.compile only a router's operator lists them."""
    if signature.mode == "compiled" and not signature.listed:
        return PAIRS_VARY
    return ""


def path_of(signature: Signature) -> str:
    """Return the path that runs the attention of a call: "cpp", "triton" or "torch"."""
    s = signature
    learned = s.mask is not None and s.mask.learned and s.gradients
    return kernels.attend_path(s.device, s.dtype, s.head_dim, s.dropout or learned)


def not_tiled(signature: Signature) -> str:
    """Return why products of looked-up rows cannot take a call's tokens or would be slower than those of all rows."""
    if not has_triton_products(signature):
        return NO_LOOK_UP
    if not kernels.fills_tiles(signature.tokens):
        return HALF_EMPTY_TILES
    return ""


def not_looked_up(signature: Signature) -> str:
    """Return why `LookedUpProducts` cannot run attention on a GPU or would be slower than all heads."""
    at_once = signature.joint is not None and not signature.context
    if has_triton_products(signature) and not at_once:
        return NOT_ONE_PRODUCT
    return not_tiled(signature)


def has_triton_products(signature: Signature) -> bool:
    """Return whether Triton's kernels that read the weights of the heads that run, without gradients, have a call."""
    s = signature
    on_gpu = s.path == "triton" and s.mode != "traced"
    return on_gpu and s.dtype in DTYPES and not s.gradients
