"""What torch must know of the compiled operators, C++ and Triton, beside their code: gradients, and the shapes of `route`.

Gradients are operators themselves, so autograd keeps what they read and nothing else. Under `create_graph=True` the
gradient is that of the same function in PyTorch, which autograd differentiates again.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from moh_vision.attention.kernels import eager

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256  # head width of Triton's kernels


def differentiate(
    name: str,
    oracle: Callable,
    backward: Callable,
    kept: tuple[int, ...] = (),
    constant: tuple[int, ...] = (),
    dropped: tuple[int, ...] = (),
    reads_outputs: bool = False,
) -> None:
    """Register the gradient of an operator.

    Args:
        name: with its library's, "moh_vision::attend".
        oracle: the operator's function in PyTorch, of the same inputs; returns its differentiable outputs.
        backward: gradients of the outputs, inputs, kept outputs -> gradients of the first inputs, by an operator.
        kept: which outputs `backward` reads.
        constant: which outputs have no gradient.
        dropped: which inputs are not kept for backward: it gets None for them, and they have no gradient.
        reads_outputs: the oracle gets the list of kept outputs before the inputs.
    """
    if reads_outputs:
        oracle_of = functools.partial(functools.partial, oracle)
    else:
        oracle_of = lambda outputs: oracle  # noqa: E731

    def keep(ctx, inputs, output):
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*(outputs[i] for i in constant))
        ctx.set_materialize_grads(False)
        inputs = [None if i in dropped else value for i, value in enumerate(inputs)]
        ctx.is_tensor = [isinstance(value, Tensor) for value in inputs]
        ctx.others = [value for value in inputs if not isinstance(value, Tensor)]
        ctx.save_for_backward(
            *(value for value in inputs if isinstance(value, Tensor)), *(outputs[i] for i in kept)
        )

    def gradients(ctx, *grads):
        saved = iter(ctx.saved_tensors)
        others = iter(ctx.others)
        inputs = [next(saved if tensor else others) for tensor in ctx.is_tensor]
        outputs = list(saved)
        if torch.is_grad_enabled():
            computed = again(oracle_of(outputs), grads, inputs)
        else:
            computed = backward(grads, inputs, outputs)
        return *computed, *[None] * (len(inputs) - len(computed))

    torch.library.register_autograd(name, gradients, setup_context=keep)


def again(oracle: Callable, grads: tuple[Tensor | None, ...], inputs: list) -> list[Tensor | None]:
    """Gradients of the oracle at `inputs`, with a graph of their own."""
    device = next(value.device for value in inputs if isinstance(value, Tensor))
    # Views: a tensor that is two inputs at once has two gradients.
    inputs = [t.view_as(t) if isinstance(t, Tensor) and t.requires_grad else t for t in inputs]
    with torch.autocast(device.type, enabled=False), sdpa_kernel(SDPBackend.MATH):
        outputs = oracle(*inputs)
    wanted = [
        i for i, value in enumerate(inputs) if isinstance(value, Tensor) and value.requires_grad
    ]
    both = [
        (output, grad)
        for output, grad in zip(outputs, grads)
        if grad is not None
        and output.requires_grad  # the gate of one shared head alone is constant
    ]
    computed = torch.autograd.grad(
        [output for output, _ in both], [inputs[i] for i in wanted], [grad for _, grad in both],
        create_graph=True, allow_unused=True,
    )  # fmt: skip
    of = dict(zip(wanted, computed))
    return [of.get(i) for i in range(len(inputs))]


def describe_route(library: str, lists_pairs: bool) -> None:
    """Tell torch the shapes and gradients of a library's `route` and `route_backward`.

    Args:
        library: "moh_vision".
        lists_pairs: its last two outputs are the list of pairs.
    """
    operators = getattr(torch.ops, library)

    @torch.library.register_fake(f"{library}::route")
    def _(x, weight, candidates, shared, routed, kind, padding):
        B, N, H = x.shape[0], x.shape[1], shared + candidates
        shapes = (B, N, H), (B, N, weight.shape[0]), (B, N, candidates), (B, H)
        weights, rows, probs, counts = (x.new_empty(shape, dtype=torch.float32) for shape in shapes)
        outputs = weights, x.new_empty((B, N, H), dtype=torch.bool), rows, probs, counts
        if not lists_pairs:
            return outputs
        token = x.new_empty(B * N * (shared + routed), dtype=torch.int32)
        return *outputs, token, x.new_empty(H * B + 1, dtype=torch.int32)

    @torch.library.register_fake(f"{library}::route_backward")
    def _(dweights, dprobs, drows, rows, x, weight, candidates, shared, routed, kind, padding):
        return x.new_empty(x.shape), weight.new_empty(weight.shape)

    def oracle(x, weight, candidates, shared, routed, kind, padding):
        rows = eager.gate_logits(x, weight)
        balanced = weight.shape[0] > candidates + (shared if shared > 1 else 0)
        routing = eager.choose(rows, candidates, shared, routed, kind, balanced, padding)
        return routing.weights, routing.active, rows, routing.stats.probs

    def backward(grads, inputs, outputs):
        dweights, _, drows, dprobs = grads[:4]
        return operators.route_backward(dweights, dprobs, drows, *outputs, *inputs)

    constant = (1, 4, 5, 6) if lists_pairs else (1, 4)
    differentiate(f"{library}::route", oracle, backward, kept=(2,), constant=constant)
