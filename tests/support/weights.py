"""Load weights as scripts do."""

from collections.abc import Callable, Sequence

from torch import nn

from moh_vision.models.weights import find_weights


def init_from(
    model: nn.Module,
    source: str,
    say: Callable[[str], None] = print,
    classes: Sequence[str] | None = None,
) -> bool:
    """Load weights as --init-from does; `say` each line on what differs; return whether the weights have no routers."""
    taken = find_weights(source, key="init_from").start(model, classes)
    for line in (*taken.resized, *taken.changed):
        say(f"init_from: {line}")
    return taken.dense
