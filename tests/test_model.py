"""The network: sizes, loss in chunks, masking, checkpointing, the meta device, an independent model."""

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, tiny_model

from bench import peak_bytes
from configs.sizes import SIZES, build
from model import (
    GPT,
    ChunkedCrossEntropy,
    ModelConfig,
    add_matmul_,
    flops_per_token,
    parameter_count,
    scale_parameter_count,
)
from norms import ScaleConfig
from train import can_compile

COUNTS = {  # size: (parameters, scale parameters), plain
    "120m": (119_744_256, 9_984),
    "250m": (254_018_560, 25_600),
    "500m": (522_021_120, 52_480),
    "1b": (1_028_065_024, 80_640),
    "2b": (2_015_559_936, 131_328),
}


def on_meta(size, strategy):
    config = build(size, strategy).resolved()
    with torch.device("meta"):
        return GPT(config.model, config.scale, config.moe)


@pytest.mark.parametrize("size", COUNTS)
def test_parameter_counts(size):
    model = on_meta(size, "plain")
    assert (parameter_count(model), scale_parameter_count(model)) == COUNTS[size]
    assert parameter_count(model) == sum(parameter.numel() for parameter in model.parameters())


def test_or_adds_45_scalars_to_1b():
    plain, split = on_meta("1b", "plain"), on_meta("1b", "or")
    assert scale_parameter_count(split) - scale_parameter_count(plain) == 45


@pytest.mark.parametrize("strategy", ["plain", "unified"])
def test_moe_sizes(strategy):
    model = on_meta("moe_2b", strategy)
    if strategy == "plain":
        assert parameter_count(model) == 2_030_501_120
    assert parameter_count(model, active=True) < parameter_count(model) / 3
    assert 0.45e9 < parameter_count(on_meta("moe_500m", strategy)) < 0.55e9


def test_flops_count_matmuls_and_attention():
    model = tiny_model("plain")
    c = model.config
    attention = c.d_model * c.head_dim * (2 * c.n_head + 2 * c.n_kv_head)
    weights = c.n_layer * (attention + 3 * c.d_model * c.d_ff) + c.padded_vocab_size * c.d_model
    assert flops_per_token(model) == 6 * weights + 12 * c.n_layer * c.n_head * c.head_dim * c.block_size
    assert flops_per_token(tiny_model("unified")) == flops_per_token(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk", [1, 5, 16, 100])
def test_chunked_loss_equals_plain_loss(chunk, dtype, generator):
    hidden = torch.randn(18, 12, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(64, 12, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(61, (18,), generator=generator)
    plain = F.cross_entropy((hidden @ weight.T)[:, :61], targets)
    expected = torch.autograd.grad(3 * plain, (hidden, weight))
    chunked = ChunkedCrossEntropy.apply(hidden, weight, targets, 61, chunk)
    found = torch.autograd.grad(3 * chunked, (hidden, weight))
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    for a, b in zip((chunked, *found), (plain, *expected)):
        assert torch.allclose(a, b, atol=tolerance, rtol=tolerance)
    assert (found[1][61:] == 0).all()  # the padding learns nothing


@pytest.mark.parametrize("vocab_size", [61, 64])
def test_loss_is_the_same_in_every_setting(vocab_size, tokens, generator):
    model = tiny_model("unified", generator, vocab_size=vocab_size)
    targets = tokens.roll(-1, 1)
    logits, none = model(tokens)
    assert none is None and logits.shape == (*tokens.shape, vocab_size)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    for model.loss_chunk in (0, 4, 512):
        assert torch.allclose(model(tokens, targets)[1], expected, atol=1e-13)
        with torch.no_grad():
            assert torch.allclose(model(tokens, targets)[1], expected, atol=1e-13)
    assert model(tokens, targets)[0] is None


def test_second_derivatives_need_chunking_off(tokens, generator):
    hidden = torch.randn(18, 12, generator=generator, dtype=torch.float64, requires_grad=True)
    model = tiny_model("plain", d_model=12, n_head=2, n_kv_head=2)
    with pytest.raises(RuntimeError, match="loss_chunk = 0"):
        torch.autograd.grad(model.loss(hidden, tokens.flatten()), hidden, create_graph=True)
    model.loss_chunk = 0
    (gradient,) = torch.autograd.grad(model.loss(hidden, tokens.flatten()), hidden, create_graph=True)
    gradient.square().sum().backward()
    assert hidden.grad.abs().max() > 0


def test_a_second_backward_of_the_chunked_loss_is_refused(generator):
    hidden = torch.randn(4, 3, generator=generator, requires_grad=True)
    loss = ChunkedCrossEntropy.apply(hidden, torch.randn(8, 3, generator=generator), torch.tensor([0, 1, 2, 3]), 8, 2)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_activation_checkpointing_changes_nothing(tokens, generator):
    model = tiny_model("unified", generator)
    gradients = []
    for model.activation_checkpointing in (False, True):
        model.zero_grad()
        model(tokens, tokens.roll(-1, 1))[1].backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_compiled_gradients_are_those_of_eager(tokens, generator):
    """Losses alone would not show a compiler that gets a reduction of the backward pass wrong."""
    if not can_compile(torch.device("cpu")):
        pytest.skip("torch.compile needs a C++ compiler")
    model = tiny_model("unified", generator, n_layer=1).float()
    gradients = []
    for forward in (model, torch.compile(model)):
        model.zero_grad()
        forward(tokens, tokens.roll(-1, 1))[1].backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    largest = max(gradient.abs().max() for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradients[1][name], gradient, rtol=1e-4, atol=1e-5 * largest), name


def test_causality(tokens, generator):
    model = tiny_model("unified", generator)
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % TINY["vocab_size"]
    a, b = model(tokens)[0], model(changed)[0]
    assert torch.equal(a[:, :5], b[:, :5]) and not torch.allclose(a[:, 5:], b[:, 5:])


def test_a_seed_fixes_the_first_matrices_of_every_strategy():
    plain = dict(GPT(ModelConfig(**TINY)).named_parameters())
    unified = dict(GPT(ModelConfig(**TINY), ScaleConfig(strategy="unified")).named_parameters())
    matrices = [name for name in plain if name.endswith("weight")]
    assert len(matrices) == 2 * 7 + 2
    assert all(torch.equal(plain[name], unified[name]) for name in matrices)


def test_init_spread():
    model = GPT(ModelConfig(n_layer=8, n_head=4, d_model=192, vocab_size=500))
    std = 0.02 * (768 / 192) ** 0.5
    assert model.config.init_std == pytest.approx(std)
    assert model.blocks[0].feedforward.up.weight.std().item() == pytest.approx(std, rel=0.02)
    assert model.blocks[3].attention.o.weight.std().item() == pytest.approx(std / 4, rel=0.02)
    assert ModelConfig(d_model=2304).resolved().init_std == 0.02


def test_generate_is_seeded_and_stays_in_the_vocabulary(tokens):
    model = tiny_model("plain")
    written = [model.generate(tokens, 30, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*written) and written[0].shape == (2, 39) and written[0].max() < TINY["vocab_size"]


def test_too_long_an_input_is_refused(tokens):
    with pytest.raises(ValueError, match="block_size is 4"):
        tiny_model("plain", block_size=4)(tokens)


def llama_weights(model):
    """Our plain model's weights under the names of transformers' LlamaForCausalLM."""
    weights = {"model.embed_tokens.weight": model.embedding.weight, "lm_head.weight": model.head.weight}
    weights["model.norm.weight"] = model.scales.value("gamma")
    for i, block in enumerate(model.blocks):
        for name in "qkvo":
            weights[f"model.layers.{i}.self_attn.{name}_proj.weight"] = getattr(block.attention, name).weight
        for name in ("gate", "up", "down"):
            weights[f"model.layers.{i}.mlp.{name}_proj.weight"] = getattr(block.feedforward, name).weight
        weights[f"model.layers.{i}.input_layernorm.weight"] = block.attention.scales.value("gamma")
        weights[f"model.layers.{i}.post_attention_layernorm.weight"] = block.feedforward.scales.value("gamma")
    return weights


@pytest.mark.parametrize("n_kv_head", [2, 4])
def test_plain_equals_transformers_llama(n_kv_head, tokens, generator):
    transformers = pytest.importorskip("transformers", reason="the independent model needs transformers")
    model = tiny_model("plain", generator, n_kv_head=n_kv_head, vocab_size=64).float()
    c = model.config
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=c.d_model, intermediate_size=c.d_ff, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, head_dim=c.head_dim, rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.block_size, rope_theta=c.rope_theta, tie_word_embeddings=False,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config).float().eval()
    llama.load_state_dict({name: weight.detach() for name, weight in llama_weights(model).items()})
    logits, loss = model(tokens)[0], model(tokens[:, :-1], tokens[:, 1:])[1]
    theirs = llama(tokens, labels=tokens)
    assert torch.allclose(logits, theirs.logits, atol=2e-5, rtol=1e-4)
    assert loss.item() == pytest.approx(theirs.loss.item(), abs=1e-5)


def test_sizes_are_all_there():
    assert set(SIZES) == {*COUNTS, "moe_500m", "moe_2b"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_matmul_adds(dtype):
    total = torch.ones(5, 7)
    a, b = torch.randn(5, 3).to(dtype), torch.randn(3, 7).to(dtype)
    wanted = 1 + (a @ b).float()
    add_matmul_(total, a, b)
    torch.testing.assert_close(total, wanted)
    torch.library.opcheck(add_matmul_, (total, a, b))  # what torch.compile has to know of it: that it writes to total


def test_add_matmul_needs_no_second_total():
    total, a, b = torch.zeros(64, 64), torch.ones(64, 2), torch.ones(2, 64)
    assert peak_bytes(lambda: add_matmul_(total, a, b), total.device) < total.nbytes
