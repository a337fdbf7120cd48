"""How the base's layers run: on which kernels, and compiled, recomputed or with offloaded activations."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agilerl.checks.arguments import reason
from agilerl.config.base_model import AttentionKind, SharedOptions
from agilerl.errors import ConfigError, how_to_install
from agilerl.models.lora import RoundedLinear, StackedLoRALinear
from agilerl.models.slots import AdapterStore
from agilerl.sizes import CPU_ROWS, LONG_SUM, LONG_SUM_ROWS


def body_of(model: Any) -> nn.Module:
    """Return the part of a causal language model that maps tokens to hidden states; of a multimodal one its text's."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    # What some models call a decoder is their head, or has it inside.
    for module in (decoder, *model.modules()):
        inside = set(module.modules())
        if {table} <= inside and module is not table and head not in inside and hasattr(module, "config"):
            return cast(nn.Module, module)
    return cast(nn.Module, decoder)


_FLASH = ("flash_attention_2", "flash_attention_3")


def choose_attention(model: Any, kind: AttentionKind | None, device: torch.device) -> None:
    """Set a model's attention kernel; None keeps the current one. Raises ConfigError if it is not available here."""
    if kind is None or kind == getattr(model.config, "_attn_implementation", None):
        return
    if device.type != "cuda" and kind in ("flex_attention", *_FLASH):
        raise ConfigError(
            f"attn_implementation={kind!r} needs a CUDA device for its backward pass, found {device.type}; use 'sdpa' "
            "or 'eager'"
        )
    try:
        model.set_attn_implementation(kind)
    except (ImportError, ValueError, RuntimeError) as error:
        raise ConfigError(f"attn_implementation={kind!r} is not available here: {reason(error)}; use 'sdpa'") from error


@contextmanager
def using_attention(config: Any, kind: AttentionKind) -> Iterator[None]:
    """Let layers attend by another kernel while the context is open; a model that does not name one stays as it is."""
    before = config._attn_implementation
    if before is not None:
        config._attn_implementation = kind
    try:
        yield
    finally:
        config._attn_implementation = before


Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float | None], Tensor]
"""``(query, key, value, mask, scale)``, the first three ``[rows, heads, n, d]`` -> answers ``[rows, n, heads, d]``."""


def asking(mask: Tensor, attend: Attend) -> Tensor:
    """Return a mask ``[..., ..., ..., ...]`` that makes SDPA layers which are given it attend by ``attend``.

    The mask says how, not a setting of the model, so that a layer that is computed again in the backward pass does the
    same again, and other models of the process are not affected. Models pass masks of four dimensions on as they are.
    """
    _let_masks_decide()
    mask._attend = attend  # type: ignore[attr-defined]
    return mask


@cache
def _let_masks_decide() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Once a process: a second wrapper would take the first one for the usual function.
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
    computed = signature(usual).parameters

    def sdpa(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Any]:
        if _recording:
            _recording[-1] |= {name for name, value in options.items() if name not in computed and _is_number(value)}
        attend = getattr(attention_mask, "_attend", None)
        # attend knows no position bias; BaseModel.flat notices a layer that did not ask.
        if attend is None or options.get("position_bias") is not None:
            return usual(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
        return attend(query, key, value, attention_mask, options.get("scaling")), None

    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa


_recording: list[set[str]] = []


@contextmanager
def recorded_options() -> Iterator[set[str]]:
    """Yield a set that gets the names of numbers that layers hand to SDPA and that it leaves out of its sums."""
    _let_masks_decide()
    _recording.append(set())
    try:
        yield _recording[-1]
    finally:
        _recording.pop()


def _is_number(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, float)


def attend_decoding(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Attend with one query a row, ``[rows, heads, 1, d]``, to keys ``[rows, shared, length, d]``.

    The query heads of one key-value head become further queries of it: the same products, summed by the same kernel,
    without the copy of keys and values to every query head that transformers makes whenever there is a mask, for each
    layer and token.
    """
    rows, heads, _, width = query.shape
    shared = key.shape[1]
    answers = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, shared, heads // shared, width), key, value, attn_mask=mask, scale=scale
    )
    return answers.reshape(rows, 1, heads, value.shape[3])


def attend_part(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Return answers of ``q [n, heads, s, d]`` over some of its keys, and the logarithm of their weights' sum.

    Answers over other keys can be joined to them: each counts by its sum. ``mask`` is added to the scores.
    """
    if q.device.type == "cpu" and q.shape[3] == v.shape[3]:
        options = {"attn_mask": mask, "scale": scale}
        # What torch's public function calls; only this one also returns the logarithm.
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **options)  # type: ignore[no-any-return]
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    scores = scores if mask is None else scores + mask
    weight = scores.logsumexp(-1)
    return (scores - weight[..., None]).exp().to(v.dtype) @ v, weight


def apply_liger_kernels(model: Any, device: torch.device) -> None:
    """Let Liger's Triton kernels compute RMSNorm and SwiGLU of one model.

    Raises ConfigError without a CUDA device, without liger-kernel, and for a model that Liger does not support.
    """
    if device.type != "cuda":
        raise ConfigError(
            f"use_liger_kernel=True needs a CUDA device, found {device.type}: Liger's kernels are written in Triton; "
            "leave it out here"
        )
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ConfigError(
            "use_liger_kernel=True needs liger-kernel with triton, which is not installed: " + how_to_install("liger")
        ) from error
    kind = model.config.get_text_config().model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(
            f"use_liger_kernel=True: Liger has no kernels for a {kind!r} model; leave it out, or use one of "
            f"{', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN)[:8])}, ..."
        )
    patch = MODEL_TYPE_TO_APPLY_LIGER_FN[kind]
    # Liger's head and loss stay off: they would compute logits for a whole batch, and of one agent only. Its rotary
    # embedding would replace that of every model of this kind in the process, as would the classes that it puts into
    # transformers' module beside the layers of this model.
    off = ("cross_entropy", "fused_linear_cross_entropy", "rope")
    transformers_module = vars(sys.modules[type(model).__module__])
    before = dict(transformers_module)
    try:
        patch(model=model, **{name: False for name in off if name in signature(patch).parameters})
    finally:
        transformers_module.update(before)


# -- bfloat16 on a CPU ----------------------------------------------------------------------------------------------


def round_products(model: nn.Module) -> None:
    """Let a bf16 model compute in fp32 on a CPU, but for the products of its linear layers.

    CPUs multiply matrices in bf16 twice as fast as in fp32, but what lies between products (norms, rotations, softmax)
    is slow there in bf16, and rounds more. Weights outside of linear layers and embeddings become fp32. A model in
    which they are more than a tenth (fused experts, GPT-2's layers) is left as it is.
    """
    linear = [module for module in model.modules() if type(module) is nn.Linear]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    kept = {id(weight) for module in (*linear, *tables) for weight in module.parameters()}
    rest = [weight for weight in model.parameters() if id(weight) not in kept]
    if sum(w.numel() for w in rest) > 0.1 * sum(w.numel() for w in model.parameters()):
        return
    for weight in rest:
        weight.data = weight.data.float()
    for module in linear:
        # Only the class: names, parameters and tied weights stay.
        module.__class__ = RoundedLinear
    for table in tables:
        table.register_forward_hook(lambda table, ids, vectors: vectors.float())


# -- the layers in training: compiled, recomputed in the backward pass, or with offloaded activations -----------------


class _LayerForward:
    """The forward of one decoder layer under the current options. Decoding always uses the layer's original forward."""

    def __init__(self, layer: nn.Module) -> None:
        self.original: Callable[..., Any] = layer.forward
        self.compiled: Callable[..., Any] | None = None
        self.store: AdapterStore | None = None
        self.recompute = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is not None:
            return self.original(*args, **kwargs)
        forward = self.compiled or self.original
        if not (self.recompute and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        store = self.store
        route, rows = (None, 0) if store is None else (store.route, store.batch_rows)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            # The second forward happens in the backward pass, after the route of the first one has ended.
            return nullcontext(), nullcontext() if store is None else store.as_now(route, rows)

        # A frozen base without dropout draws no random numbers, so there is no generator state to restore.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)


def decoder_layers(body: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of a body that are known as such."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in body.modules() if isinstance(module, GradientCheckpointingLayer)]


def configure_layers(body: nn.Module, options: SharedOptions, store: AdapterStore | None) -> None:
    """Apply the options to the decoder layers of a body; raises ConfigError if it has no known decoder layers."""
    wanted, layers = options.gradient_checkpointing or options.torch_compiler is not None, decoder_layers(body)
    if wanted and not layers:
        names = "gradient_checkpointing" if options.gradient_checkpointing else "torch_compiler"
        raise ConfigError(f"{names} needs a model with decoder layers, found {type(body).__name__} without any")
    if options.torch_compiler is not None:
        _check_compiler(options.torch_compiler, next(body.parameters()).device)
    for layer in layers:
        changed = layer.__dict__.get("forward")
        if not wanted:
            if isinstance(changed, _LayerForward):
                del layer.forward
            continue
        forward = changed if isinstance(changed, _LayerForward) else _LayerForward(layer)
        forward.store, forward.recompute = store, options.gradient_checkpointing
        forward.compiled = None
        if options.torch_compiler is not None:
            for module in layer.modules():
                if isinstance(module, StackedLoRALinear):
                    module.leave_graph()
            # The layers share their code, so one graph serves them all; lengths vary, so it is compiled for any length.
            forward.compiled = torch.compile(forward.original, mode=options.torch_compiler, dynamic=True)
        layer.forward = forward


class _NormForward:
    """The forward of an RMSNorm whose backward pass reads its input half as often as autograd's."""

    def __init__(self, norm: nn.Module, epsilon: float) -> None:
        self.original, self.norm, self.epsilon = norm.forward, norm, epsilon

    def __call__(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return cast(Tensor, self.original(x))
        return cast(Tensor, _RMSNorm.apply(x, self.norm.weight, self.epsilon))  # type: ignore[no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    """``weight x / sqrt(mean(x^2) + epsilon)`` over the last dimension, with a frozen weight, as Llama computes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, inverse)
        ctx.weight = weight
        return weight * (wide * inverse).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, inverse = ctx.saved_tensors
        wide, weighted = x.to(inverse.dtype), (grad * ctx.weight).to(inverse.dtype)
        # With n = x inverse, the gradient is inverse (weighted - n mean(weighted n)).
        along = (weighted * wide).mean(-1, keepdim=True).mul_(inverse.pow(3))
        return weighted.mul_(inverse).sub_(wide * along).to(x.dtype), None, None


@torch.no_grad()
def configure_norms(body: nn.Module, *, enabled: bool) -> None:
    """Let RMSNorms use our backward pass if ``enabled`` and their forward is Llama's, to the bit."""
    for norm in body.modules():
        changed = norm.__dict__.get("forward")
        if isinstance(changed, _NormForward) and not enabled:
            del norm.forward
        if changed is not None or not enabled or not type(norm).__name__.endswith("RMSNorm"):
            continue
        epsilon = next((getattr(norm, n) for n in ("variance_epsilon", "eps", "epsilon") if hasattr(norm, n)), None)
        weight = getattr(norm, "weight", None)
        if epsilon is None or not isinstance(weight, Tensor) or weight.dim() != 1 or weight.is_meta:
            continue
        # Tried out, because the name says little: Gemma's RMSNorm multiplies by 1 + weight.
        x = torch.linspace(-3, 2, 2 * len(weight), device=weight.device, dtype=weight.dtype).view(2, -1)
        if torch.equal(norm(x), _RMSNorm.apply(x, weight, epsilon)):  # type: ignore[no-untyped-call]
            norm.forward = _NormForward(norm, epsilon)


EXPERTS = "agilerl"
"""Our implementation of a mixture's fused experts, as a model's configuration names it."""


@cache
def register_experts() -> None:
    """Let configurations name our implementation of experts."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)


def _experts(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return ``[N, H]`` from hidden states ``[N, H]``, the experts ``[N, K]`` of each token, and their weights.

    The tokens of an expert are padded to a number of rows with which a row's bits do not depend on the other rows.
    """
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    ups = getattr(experts, name)
    # Backward passes sum over outputs: over one dimension of ups for up, over the other one for down.
    long = torch.is_grad_enabled() and max(ups.shape[1:]) >= LONG_SUM
    # Places in [N K], expert by expert and in each by token; place // K is the token.
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=len(ups)).tolist()
    outputs = []
    for number, places in enumerate(torch.split(order, counts)):
        if not len(places):
            continue
        rows = max(-(-len(places) // CPU_ROWS) * CPU_ROWS, LONG_SUM_ROWS if long else 0)
        x = nn.functional.pad(hidden[places // chosen.shape[1]], (0, 0, 0, rows - len(places)))
        up = _of_expert(experts, x, name, number)
        up = experts._apply_gate(up) if experts.has_gate else experts.act_fn(up)
        outputs.append(_of_expert(experts, up, "down_proj", number)[: len(places)])
    weighted = torch.cat(outputs)[order.argsort()] * weights.flatten()[:, None]  # in the order of the tokens
    return weighted.view(*chosen.shape, -1).sum(1).to(hidden.dtype)  # [N, K, H], in the order of choice


def _of_expert(experts: Any, x: Tensor, name: str, number: int) -> Tensor:
    weight = getattr(experts, name)[number]
    bias = getattr(experts, f"{name}_bias")[number] if experts.has_bias else None
    return nn.functional.linear(x, weight.T if experts.is_transposed else weight, bias)


@cache
def _check_compiler(mode: str, device: torch.device) -> None:
    """Raise ConfigError if torch.compile does not work: it needs a C++ compiler, and on a GPU also Triton."""
    try:
        torch.compile(torch.sin, mode=mode)(torch.zeros(2, device=device))
    except Exception as error:  # the compiler and its backends raise errors of many types
        raise ConfigError(
            f"torch_compiler={mode!r} does not work on this machine: {reason(error)}; it needs a C++ compiler (g++), "
            "and on a GPU also Triton; install it, or leave torch_compiler out"
        ) from error


@contextmanager
def offloaded(frozen: nn.Module, *, pin: bool) -> Iterator[None]:
    """Keep the tensors that autograd saves in the host's memory while the context is open, except frozen weights.

    With ``pin`` that memory is page-locked, so that copies to and from a GPU can overlap with its work.
    """
    weights = {p.untyped_storage().data_ptr() for p in frozen.parameters()}

    def pack(tensor: Tensor) -> tuple[torch.device | None, Tensor]:
        # Autograd saves the weights too; they stay on the device anyway, so copies of them would save nothing.
        if tensor.untyped_storage().data_ptr() in weights:
            return None, tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
        host.copy_(tensor, non_blocking=pin)
        return tensor.device, host

    def unpack(saved: tuple[torch.device | None, Tensor]) -> Tensor:
        device, tensor = saved
        return tensor if device is None else tensor.to(device, non_blocking=pin)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
