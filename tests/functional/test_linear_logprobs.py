"""The fused head against full logits, and the independence of its rows."""

import pytest
import torch

from agilerl.functional import linear_logprobs, token_entropy, token_logprobs

ROWS = 64
HEADS = {"plain": {}, "bias": {"bias": True}, "gemma": {"softcap": 3.0}, "cohere": {"scale": 0.25, "bias": True}}


def head(dtype=torch.float32, rows=ROWS, width=40, vocabulary=300):
    g = torch.Generator().manual_seed(5)
    weight = 0.3 * torch.randn(vocabulary, width, generator=g, dtype=dtype)
    return {
        "hidden": torch.randn(rows, width, generator=g, dtype=dtype),
        "weight": weight,
        "bias": torch.randn(vocabulary, generator=g, dtype=dtype),
        "targets": torch.randint(vocabulary, (rows,), generator=g),
        "temperature": 0.5 + torch.rand(rows, generator=g),
        "grads": torch.randn(2, rows, generator=g, dtype=dtype),
    }


def run(x, rows=slice(None), *, entropy=True, chunk_rows=None, settings=None):
    options = dict(settings or {})
    if options.pop("bias", False):
        options["bias"] = x["bias"]
    hidden = x["hidden"][rows].clone().requires_grad_()
    logp, entropies = linear_logprobs(
        hidden,
        x["weight"],
        x["targets"][rows],
        temperature=x["temperature"][rows],
        entropy=entropy,
        chunk_rows=chunk_rows,
        **options,
    )
    loss = (logp * x["grads"][0][rows]).sum()
    if entropy:
        loss = loss + (entropies * x["grads"][1][rows]).sum()
    loss.backward()
    return [logp.detach(), hidden.grad] + ([entropies.detach()] if entropy else [])


def full(x, settings):
    hidden = x["hidden"].clone().requires_grad_()
    z = hidden @ x["weight"].T + (x["bias"] if settings.get("bias") else 0.0)
    z = z * settings.get("scale", 1.0)
    if "softcap" in settings:
        z = settings["softcap"] * torch.tanh(z / settings["softcap"])
    logp, entropies = token_logprobs(z, x["targets"], x["temperature"]), token_entropy(z, x["temperature"])
    (logp * x["grads"][0] + entropies * x["grads"][1]).sum().backward()
    return [logp.detach(), hidden.grad, entropies.detach()]


@pytest.mark.parametrize("settings", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_equals_full_logits(settings, dtype, tolerance):
    x = head(dtype)
    for chunk_rows in (None, 16, 24):
        found = run(x, settings=settings, chunk_rows=chunk_rows)
        for a, b in zip(found, full(x, settings)):
            assert a.dtype == dtype
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("settings", HEADS.values(), ids=HEADS)
def test_gradients_by_finite_differences(settings):
    x = head(torch.float64, rows=3, width=4, vocabulary=7)
    settings = dict(settings)
    bias = x["bias"] if settings.pop("bias", False) else None
    hidden = x["hidden"].requires_grad_()

    def outputs(hidden):
        return linear_logprobs(
            hidden, x["weight"], x["targets"], temperature=x["temperature"], entropy=True, bias=bias, **settings
        )

    assert torch.autograd.gradcheck(outputs, (hidden,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("settings", [HEADS["plain"], HEADS["bias"] | HEADS["gemma"]], ids=["plain", "gemma"])
def test_a_rows_bits_do_not_depend_on_other_rows(settings, dtype):
    # 300 rows are several blocks of a matrix product; at this width and vocabulary, kernels split long sums.
    x = head(dtype, rows=300, width=256, vocabulary=1500)
    whole = run(x, settings=settings)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    for count in (1, 3, 7, 15, 16, 40, 129, 200):
        rows = order[:count]
        for a, b in zip(run(x, rows, settings=settings), whole):
            assert torch.equal(a, b[rows]), count


@pytest.mark.parametrize("chunk_rows", [1, 16, 17, 32, 48, 64, 256, 1000])
def test_bits_do_not_depend_on_the_tile(chunk_rows):
    x = head(rows=300, width=256, vocabulary=1500)
    for a, b in zip(run(x, chunk_rows=chunk_rows), run(x)):
        assert torch.equal(a, b)


def test_asking_for_the_entropy_does_not_change_log_probs():
    x = head()
    x["grads"][1] = 0.0
    for a, b in zip(run(x, entropy=False), run(x, entropy=True)):
        assert torch.equal(a, b)


def test_one_temperature_equals_that_temperature_on_every_row():
    x = head()
    x["temperature"] = torch.full((ROWS,), 0.7)
    number, _ = linear_logprobs(x["hidden"], x["weight"], x["targets"], temperature=0.7)
    assert torch.equal(number, run(x)[0])


def test_a_sick_row_stays_alone_and_a_masked_one_stays_silent():
    x = head()
    clean = run(x)
    x["hidden"][[4, 9]] = float("nan")
    x["grads"][:, 4] = 0.0  # what a masked position sends back
    logp, grad, entropies = run(x)
    others = [i for i in range(ROWS) if i not in (4, 9)]
    for a, b in zip((logp, grad, entropies), clean):
        assert torch.equal(a[others], b[others])
    assert torch.equal(grad[4], torch.zeros_like(grad[4]))
    assert grad[9].isnan().all()


@pytest.mark.parametrize("fused", [True, False])
def test_a_token_that_cannot_be_drawn_does_not_spoil_the_entropy(fused):
    x = head(torch.float64)
    x["bias"][:] = float("-inf")
    x["bias"][[2, 5]] = 0.0
    hidden = x["hidden"].requires_grad_()
    if fused:
        targets = torch.full((ROWS,), 2)
        _, entropies = linear_logprobs(hidden, x["weight"], targets, bias=x["bias"], entropy=True)
    else:
        entropies = token_entropy(hidden @ x["weight"].T + x["bias"])
    entropies.sum().backward()
    p = torch.softmax((hidden @ x["weight"][[2, 5]].T).detach(), -1)
    torch.testing.assert_close(entropies.detach(), -(p * p.log()).sum(-1))
    assert hidden.grad.isfinite().all()


def test_half_precision_is_reduced_in_fp32():
    x = head(torch.bfloat16)
    logp, grad, entropies = run(x)
    assert (logp.dtype, entropies.dtype, grad.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    wide = token_logprobs((x["hidden"] @ x["weight"].T).float(), x["targets"], x["temperature"])
    torch.testing.assert_close(logp, wide, rtol=1e-5, atol=1e-5)


def test_no_rows_and_no_gradient():
    x = head(rows=0)
    assert [t.shape for t in run(x)] == [(0,), (0, 40), (0,)]
    x = head()
    with torch.no_grad():
        logp, none = linear_logprobs(x["hidden"].requires_grad_(), x["weight"], x["targets"])
    assert not logp.requires_grad
    assert none is None


def test_logits_never_exist_as_a_whole():
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor))
            return out

    x = head(rows=256)
    with Watch():
        run(x, chunk_rows=32)
    assert max(sizes) <= max(32 * 300, 300 * 40, 256 * 40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 3, 40)}, "hidden \\[M, H\\]"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "one target per row"),
        ({"temperature": 0.0}, "temperature must be greater than 0"),
        ({"chunk_rows": 0}, r"chunk_rows .* 1"),
        ({"weight": torch.zeros(300, 40, requires_grad=True)}, "frozen"),
    ],
)
def test_bad_input_gives_a_sentence(change, message):
    x = head()
    arguments = {name: x[name] for name in ("hidden", "weight", "targets")} | change
    with pytest.raises(ValueError, match=message):
        linear_logprobs(**arguments)
