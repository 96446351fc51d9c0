"""Fast paths equal the plain ones in value and gradient, and are taken where they are faster; on a GPU if there is one.

Needs torch and the model alone, so that it runs where little else is installed.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gatedlm.model import kernels
from gatedlm.model.kernels import GROUPED, attention_and_lse, grouped_attention, multiplies_bf16, softmax_attention
from gatedlm.model.lm import ExpertsSpec, GatedLM, GateSpec, ModelSpec, initialise
from gatedlm.probes import first_token_attention, tracing

B, H, G, T, D = 2, 6, 3, 7, 16
DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
SPEC = ModelSpec(vocab=37, layers=2, width=24, heads=6, kv_heads=3, head_dim=16, ffn=40, gates=[GateSpec()])


def random(*shape: int, seed: int, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def inputs(dtype: torch.dtype, tokens: int = T, device: str = "cpu") -> list[Tensor]:
    shapes = [(B, heads, tokens, D) for heads in (H, G, G)]
    made = (random(*shape, seed=seed, device=device) for seed, shape in enumerate(shapes))
    return [x.to(dtype).requires_grad_() for x in made]


def by_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head after the other, the map as a matrix."""
    heads = []
    for h in range(q.shape[1]):
        g = h * k.shape[1] // q.shape[1]
        scores = q[:, h] @ k[:, g].mT / q.shape[-1] ** 0.5
        later = torch.ones(scores.shape[-2:], device=q.device).triu(1).bool()
        heads.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v[:, g])
    return torch.stack(heads, 1)


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def value_and_gradients(attention, tensors: list[Tensor]) -> list[Tensor]:
    o = attention(*tensors)
    return [o, *torch.autograd.grad(o, tensors, random(*o.shape, seed=9, device=o.device.type).to(o.dtype))]


@pytest.mark.parametrize("device", DEVICES)
def test_grouped_attention_is_causal_attention(device):
    own = value_and_gradients(grouped_attention, inputs(torch.float64, device=device))
    torch.testing.assert_close(own, value_and_gradients(by_formula, inputs(torch.float64, device=device)))


@pytest.mark.parametrize("native", [True, False], ids=["bf16 in hardware", "emulated"])
@pytest.mark.parametrize("autocast", [True, False])
def test_attention_in_bf16_is_the_formula_within_its_rounding(native, autocast, monkeypatch):
    monkeypatch.setattr(kernels, "CPU_MULTIPLIES_BF16", native)
    tensors = inputs(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        own = value_and_gradients(softmax_attention, tensors)
    exact = value_and_gradients(by_formula, [x.detach().float().requires_grad_() for x in tensors])
    assert {x.dtype for x in own} == {torch.bfloat16}
    for got, expected in zip(own, exact, strict=True):
        assert (got - expected).abs().max() < 2**-6 * expected.abs().max()


@pytest.mark.parametrize(
    ("native", "dtype", "tokens", "masked", "taken"),
    [
        (True, torch.bfloat16, GROUPED, False, "grouped"),
        (True, torch.bfloat16, GROUPED + 1, False, "torch in bf16"),
        (True, torch.bfloat16, T, True, "torch in bf16"),
        (False, torch.bfloat16, T, False, "torch in fp32"),
        (True, torch.float32, T, False, "torch in fp32"),
    ],
)
def test_which_kernel_is_taken(native, dtype, tokens, masked, taken, monkeypatch):
    seen = []

    def saying(name: str):
        return lambda q, *_, **__: (seen.append(name.format(NAMES[q.dtype])), q)[1]

    monkeypatch.setattr(kernels, "CPU_MULTIPLIES_BF16", native)
    monkeypatch.setattr(kernels, "grouped_attention", saying("grouped"))
    monkeypatch.setattr(F, "scaled_dot_product_attention", saying("torch in {}"))
    q, k, v = inputs(dtype, tokens)
    softmax_attention(q, k, v, torch.ones(B, 1, tokens, tokens).tril().bool() if masked else None)
    assert seen == [taken]


@pytest.mark.parametrize("native", [True, False])
def test_fp32_stays_torchs_kernel_bit_for_bit(native, monkeypatch):
    monkeypatch.setattr(kernels, "CPU_MULTIPLIES_BF16", native)
    own = value_and_gradients(softmax_attention, inputs(torch.float32))
    assert all(map(torch.equal, own, value_and_gradients(by_torch, inputs(torch.float32))))


def test_bf16_in_hardware(monkeypatch):
    for native in (True, False):
        monkeypatch.setattr(kernels, "CPU_MULTIPLIES_BF16", native)
        assert multiplies_bf16("cpu") == native
    for capability, multiplies in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert multiplies_bf16("cuda") == multiplies
    assert not multiplies_bf16("mps")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("experts", [ExpertsSpec(), ExpertsSpec(5, 2)], ids=["dense", "mixture"])
def test_a_fast_model_learns_as_a_plain_one(experts, device, monkeypatch):
    """Loss and gradients in bf16 by the grouped path stay near those of fp32, and repeat bit for bit."""
    monkeypatch.setattr(kernels, "CPU_MULTIPLIES_BF16", True)
    net = GatedLM(ModelSpec(**{**vars(SPEC), "experts": experts})).to(device)
    initialise(net, seed=0)
    tokens = torch.randint(37, (B, T + 1), generator=torch.Generator().manual_seed(0)).to(device)

    def gradients(bf16: bool) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            logits = net(tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        return torch.cat([x.flatten() for x in torch.autograd.grad(loss, [*net.parameters()])])

    plain, fast = gradients(bf16=False), gradients(bf16=True)
    assert torch.equal(fast, gradients(bf16=True))
    assert torch.cosine_similarity(plain, fast, dim=0) > 0.999


def test_a_watched_pass_is_the_pass_itself_and_knows_its_log_sum_exp():
    """F-Attn's numerator is one product, its denominator comes from the kernel; checked against the map itself."""
    net = GatedLM(SPEC)
    initialise(net, seed=0)
    tokens = torch.randint(37, (B, T), generator=torch.Generator().manual_seed(0))
    with tracing(net) as outer, tracing(net) as trace:
        seen = net(tokens).logits
    assert torch.equal(seen, net(tokens).logits)
    assert "forward" not in vars(net.stations()[0].core)
    assert outer[0].lse is None
    for layer in trace:
        scores = torch.einsum("bihd,bjhd->bhij", layer.q, layer.k.repeat_interleave(2, 2)) / 4
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        torch.testing.assert_close(layer.lse, scores.logsumexp(-1))
        first = first_token_attention(layer.q, layer.k, lse=layer.lse)
        torch.testing.assert_close(first, scores.softmax(-1)[..., 0])


def test_no_log_sum_exp_where_attention_is_masked():
    q, k, v = inputs(torch.float32)
    o, lse = attention_and_lse(q, k, v, torch.eye(T).bool()[None, None])
    assert lse is None
    torch.testing.assert_close(o, v.repeat_interleave(H // G, 1))


@pytest.mark.parametrize("tokens", [T, 300])
def test_the_kernel_with_log_sum_exp_is_torchs_bit_for_bit(tokens):
    own = value_and_gradients(lambda *qkv: attention_and_lse(*qkv)[0], inputs(torch.float32, tokens))
    assert all(map(torch.equal, own, value_and_gradients(by_torch, inputs(torch.float32, tokens))))


@pytest.mark.parametrize(("native", "word"), [(True, "bf16"), (False, "fp32")])
def test_precision_auto_becomes_what_the_machine_multiplies(native, word, monkeypatch):
    """As the recipe is read, so that names, ledgers and resumed runs know what was computed."""
    recipe = pytest.importorskip("gatedlm.recipe")
    monkeypatch.setattr(kernels, "CPU_MULTIPLIES_BF16", native)
    words = ["recipe=quickstart", "trainer.accelerator=cpu"]
    auto, named = (recipe.load([*words, f"trainer.precision={kind}"])[0].recipe for kind in ("auto", word))
    assert auto == named
    assert auto.trainer.precision == word
    assert recipe.from_yaml("trainer: {precision: auto, accelerator: cpu}").trainer.precision == word
    assert recipe.load(words)[0].recipe.trainer.precision == "fp32"
