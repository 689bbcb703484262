"""Register gradients and fake implementations (shapes without values) of compiled operators, C++ or Triton, with torch.

Backward passes are operators too: autograd sees only the whole operator, and saves only what the backward operator reads.
Under `create_graph=True` gradients are computed through the oracle, which is the same function in plain PyTorch, because
autograd can differentiate the oracle again.

Operators with a gradient are called by `run`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from moh_vision.attention.kernels import eager
from moh_vision.attention.linear import without_autocast

PLAIN_CLASSES = (Tensor, nn.Parameter)  # of tensors that have values and no behaviour of their own
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256  # largest head width of Triton's kernels

# By name, see `add_operator`: an operator, and the Python function of one that is written in Python, as Triton's are.
_OPERATORS: dict[str, Callable] = {}
_FUNCTIONS: dict[str, Callable] = {}
# By name: the node of autograd of an operator. `differentiate` fills it.
_NODES: dict[str, type[torch.autograd.Function]] = {}


def add_operator(name: str, function: Callable | None = None) -> None:
    """Let `run` and `call` find an operator that is defined.

    Args:
        name: library and name of the operator, such as "moh_vision::attend".
        function: what the operator calls, if it is written in Python.
    """
    library, _, short_name = name.partition("::")
    _OPERATORS[name] = getattr(getattr(torch.ops, library), short_name).default
    if function is not None:
        _FUNCTIONS[name] = function


def run(name: str, *inputs: Any) -> Any:
    """Call an operator that `differentiate` knows, with all of its arguments.

    In eager mode the node of autograd is a torch.autograd.Function around the operator: calling the operator itself, whose
    gradient is registered with torch.library, takes several times as long on the host. torch.compile cannot trace these
    Functions, and takes the registered gradient.
    """
    if torch.compiler.is_compiling():
        return _OPERATORS[name](*inputs)
    if torch.is_grad_enabled():
        return _NODES[name].apply(*inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return call(name, *inputs)


def call(name: str, *inputs: Any) -> Any:
    """Call an operator that `add_operator` knows, without a gradient.

    The Python function of an operator is called directly, unless somebody must see the operator: handing a dozen arguments
    and results through torch's dispatcher takes a third as long on the host as what the function itself does.
    """
    if torch.compiler.is_compiling():
        return _OPERATORS[name](*inputs)
    function = _FUNCTIONS.get(name)
    if function is None or needs_dispatcher(inputs):
        return _OPERATORS[name](*inputs)
    return function(*inputs)


def needs_dispatcher(inputs: tuple[Any, ...]) -> bool:
    """Return whether the operator itself must be called.

    It must under a mode that watches operators, as a counter of FLOPs does, in a profile, and under torch.func; and for
    tensors without values or of another class. Tensors in a list are not looked at.

    inputs: of the operator.
    """
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return True
    if torch._C._are_functorch_transforms_active() or torch.autograd._profiler_enabled():
        return True
    for value in inputs:
        if type(value) in PLAIN_CLASSES:
            if value.is_meta:
                return True
        elif isinstance(value, Tensor):
            return True
    return False


def differentiate(
    name: str,
    oracle: Callable,
    backward: Callable,
    kept: tuple[int, ...] = (),
    constant: tuple[int, ...] = (),
    dropped: tuple[int, ...] = (),
    reads_outputs: bool = False,
    returned: int | None = None,
) -> None:
    """Register the gradient of an operator.

    Args:
        name: of an operator that `add_operator` knows.
        oracle: computes the same in PyTorch, from the same inputs; returns the first outputs of the operator, in their
            order. Outputs in `constant` are ignored.
        backward: calls the operator's backward: (gradients of the outputs, inputs, kept outputs) -> gradients of the
            inputs. It may return fewer than there are inputs: the last ones have no gradient.
        kept: indices of the outputs that are saved for `backward`.
        constant: indices of the outputs that have no gradient.
        dropped: indices of the inputs that are not saved for `backward`, which gets None for them; they have no gradient.
        reads_outputs: the first argument of the oracle is the list of kept outputs; the inputs follow.
        returned: how many of the outputs, in eager mode, the caller of `run` gets where gradients are recorded: the others
            are for backward alone. None: all.
    """
    without_gradient = frozenset(constant)
    constant_in_eager = constant
    if returned is not None:
        constant_in_eager = tuple(i for i in constant if i < returned)

    def keep(ctx, inputs, output, constant=constant):
        outputs = output
        if not isinstance(output, tuple):
            outputs = (output,)
        ctx.mark_non_differentiable(*(outputs[i] for i in constant))
        ctx.set_materialize_grads(False)
        values = list(inputs)  # with None in place of tensors
        saved = []
        indices = []  # of these tensors
        for i, value in enumerate(inputs):
            if isinstance(value, Tensor):
                values[i] = None
                if i not in dropped:
                    indices.append(i)
                    saved.append(value)
        for i in kept:
            value = outputs[i]
            # Detached here: autograd would detach an output that has a gradient twice, when it is saved and when it is read.
            saved.append(value if i in without_gradient else value.detach())
        ctx.values = values
        ctx.indices = indices
        ctx.save_for_backward(*saved)

    def gradients(ctx, *grads):
        saved = ctx.saved_tensors
        inputs = list(ctx.values)
        for i, value in zip(ctx.indices, saved):
            inputs[i] = value
        # The kept outputs were saved after the inputs.
        outputs = list(saved[len(ctx.indices) :])
        if torch.is_grad_enabled():
            function = oracle
            if reads_outputs:
                function = functools.partial(oracle, outputs)
            computed = differentiable_gradients(function, grads, inputs)
        else:
            computed = backward(grads, inputs, outputs)
        no_gradients = [None] * (len(inputs) - len(computed))
        return *computed, *no_gradients

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            with torch._C._AutoDispatchBelowAutograd():
                output = call(name, *inputs)
            keep(ctx, inputs, output, constant_in_eager)
            if returned is not None:
                return output[:returned]
            return output

        backward = staticmethod(gradients)

    Node.__name__ = name.partition("::")[2]
    _NODES[name] = Node
    torch.library.register_autograd(name, gradients, setup_context=keep)


def differentiable_gradients(
    oracle: Callable, grads: tuple[Tensor | None, ...], inputs: list
) -> list[Tensor | None]:
    """Compute the gradients of the oracle at `inputs`, with a graph, so that autograd can differentiate them again."""
    any_tensor = next(value for value in inputs if isinstance(value, Tensor))
    inputs = list(inputs)
    indices = []  # indices of the inputs that require a gradient
    wanted = []  # these inputs
    for i, value in enumerate(inputs):
        if isinstance(value, Tensor) and value.requires_grad:
            # A view for each input: if one tensor is passed as two inputs, autograd must tell the two apart.
            inputs[i] = value.view_as(value)
            indices.append(i)
            wanted.append(inputs[i])
    with without_autocast(any_tensor), sdpa_kernel(SDPBackend.MATH):
        outputs = oracle(*inputs)
    differentiable = []
    their_grads = []
    for output, grad in zip(outputs, grads):
        # An output may depend on no input: the gate of a single shared head without other heads is always 1.
        if grad is not None and output.requires_grad:
            differentiable.append(output)
            their_grads.append(grad)
    computed = torch.autograd.grad(
        differentiable, wanted, their_grads, create_graph=True, allow_unused=True
    )
    gradients: list[Tensor | None] = [None] * len(inputs)
    for i, gradient in zip(indices, computed):
        gradients[i] = gradient
    return gradients


def describe_route(library: str, lists_pairs: bool) -> None:
    """Register shapes and gradients of a library's `route` and `route_backward`.

    Those in Triton read the rows of the router's weight in up to three tensors, the last two arguments among them.

    Args:
        library: name of the library, such as "moh_vision".
        lists_pairs: the last two outputs of `route` are the list of pairs.
    """

    @torch.library.register_fake(f"{library}::route")
    def _(x, weight, candidates, shared, routed, gate_form, padding, second=None, third=None):
        B, N, _ = x.shape
        H = shared + candidates
        weights = x.new_empty((B, N, H), dtype=torch.float32)
        rows = sum(part.shape[0] for part in parts_of_weight(weight, second, third))
        router_outputs = x.new_empty((B, N, rows), dtype=torch.float32)
        probs = x.new_empty((B, N, candidates), dtype=torch.float32)
        counts = x.new_empty((B, H), dtype=torch.float32)
        active = x.new_empty((B, N, H), dtype=torch.bool)
        outputs = weights, active, router_outputs, probs, counts
        if not lists_pairs:
            return outputs
        token = x.new_empty(B * N * (shared + routed), dtype=torch.int32)
        return *outputs, token, x.new_empty(H * B + 1, dtype=torch.int32)

    @torch.library.register_fake(f"{library}::route_backward")
    def _(dweights, dprobs, drouter_outputs, router_outputs, x, weight, *settings):
        return x.new_empty(x.shape), weight.new_empty(router_outputs.shape[2], weight.shape[1])

    def oracle(x, weight, candidates, shared, routed, gate_form, padding, second=None, third=None):
        joint = torch.cat(parts_of_weight(weight, second, third))
        router_outputs = eager.gate_logits(x, joint)
        balanced = eager.is_balanced(joint, candidates, shared)
        routing = eager.choose(
            router_outputs, candidates, shared, routed, gate_form, balanced, padding
        )
        return routing.weights, routing.active, router_outputs, routing.stats.probs

    def backward(grads, inputs, outputs):
        dweights, _, drouter_outputs, dprobs = grads[:4]
        (router_outputs,) = outputs
        grads = (dweights, dprobs, drouter_outputs)
        dx, dweight = call(f"{library}::route_backward", *grads, router_outputs, *inputs)
        if lists_pairs:
            return dx, dweight
        first, second, third = gradients_of_parts(dweight, inputs[1], *inputs[-2:])
        return dx, first, *[None] * 5, second, third

    constant = [1, 4]  # active and counts
    if lists_pairs:
        constant += [5, 6]
    differentiate(f"{library}::route", oracle, backward, kept=(2,), constant=tuple(constant))


def parts_of_weight(weight: Tensor, second: Tensor | None, third: Tensor | None) -> list[Tensor]:
    """Return the tensors that have the rows of a router's weight, in order; see `kernels.route.LinearRouter`."""
    if second is None:
        return [weight]
    if third is None:
        return [weight, second]
    return [weight, second, third]


def gradients_of_parts(
    dweight: Tensor, weight: Tensor, second: Tensor | None, third: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of three tensors that have the rows of a router's weight, None where there is no tensor.

    Args:
        dweight: gradient of all rows [R, C].
        weight, second, third: the tensors.
    """
    if second is None:
        return dweight, None, None
    rows = [part.shape[0] for part in parts_of_weight(weight, second, third)]
    parts = torch.split_with_sizes(dweight, rows)
    if third is None:
        return *parts, None
    return parts


def describe_attend(library: str) -> None:
    """Register shapes and gradients of a library's `attend_in_place` and `attend_product`, and of their backwards.

    Inputs and outputs are those of `kernels.gpu.library.attend` and `attend_product`.

    Args:
        library: name of the library, such as "moh_vision".
    """
    fake = torch.library.register_fake

    @fake(f"{library}::attend_in_place")
    def fake_attend(q, k, v, weights, token, offsets, is_causal, mask):
        B, H, N, D = q.shape
        return q.new_empty(B, N, H * D), q.new_empty(token.shape, dtype=torch.float32)

    @fake(f"{library}::attend_product")
    def _(product, heads, kv_heads, *gates_and_lists):
        return fake_attend(*split_product(product, heads, kv_heads), *gates_and_lists)

    @fake(f"{library}::attend_in_place_backward")
    def _(grad, q, k, v, o, lse, weights, *lists):
        dq, dk, dv = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))
        return dq, dk, dv, fake_dgates(lse, weights)

    @fake(f"{library}::attend_product_backward")
    def _(grad, product, o, lse, heads, kv_heads, weights, *lists):
        dproduct = torch.empty_like(product, memory_format=torch.contiguous_format)
        return dproduct, fake_dgates(lse, weights)

    def fake_dgates(lse, weights):
        if weights is None:
            return lse.new_empty(0)
        return lse.new_empty(weights.shape)

    def attend_backward(grads, inputs, outputs):
        q, k, v, weights, *lists = inputs
        *computed, dgates = call(
            f"{library}::attend_in_place_backward", grads[0], q, k, v, *outputs, weights, *lists
        )
        if weights is None:
            dgates = None
        return *computed, dgates

    def attend_product_backward(grads, inputs, outputs):
        product, heads, kv_heads, weights, *lists = inputs
        dproduct, dgates = call(
            f"{library}::attend_product_backward",
            grads[0],
            product,
            *outputs,
            heads,
            kv_heads,
            weights,
            *lists,
        )
        if weights is None:
            dgates = None
        return dproduct, None, None, dgates

    differentiate(
        f"{library}::attend_in_place", attend_oracle, attend_backward, kept=(0, 1), constant=(1,)
    )
    differentiate(
        f"{library}::attend_product",
        attend_product_oracle,
        attend_product_backward,
        kept=(0, 1),
        constant=(1,),
    )


def attend_oracle(q, k, v, weights, token, offsets, is_causal, mask) -> tuple[Tensor]:
    """Compute the outputs of `attend_in_place` in PyTorch, without lse."""
    B, H, N, D = q.shape
    token = token[: offsets[-1]]  # elements after the last pair are undefined
    rows = eager.rows_of_pairs(token, offsets, H)
    queries = q.transpose(1, 2).reshape(-1, D).index_select(0, rows)
    o = eager.attend(queries, k, v, token, offsets, H, N, None, is_causal, mask)
    if weights is not None:
        gates = weights.expand(B, N, H).flatten().index_select(0, rows)
        o = (o * gates.unsqueeze(1)).to(q.dtype)
    return (eager.scatter(o, rows, B * N * H).view(B, N, H * D),)


def attend_product_oracle(product, heads, kv_heads, *gates_and_lists) -> tuple[Tensor]:
    """Compute the outputs of `attend_product` in PyTorch, without lse."""
    return attend_oracle(*split_product(product, heads, kv_heads), *gates_and_lists)


def split_product(product: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    """Return views of a product [B, N, (H + 2 * G) * D]: q [B, H, N, D], k and v [B, G, N, D]."""
    rows = product.unflatten(-1, (heads + 2 * kv_heads, -1))
    return tuple(x.transpose(1, 2) for x in rows.split([heads, kv_heads, kv_heads], 2))
