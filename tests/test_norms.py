"""Scale vectors: the fused weights against scaled activations, folding, first values, roles."""

import pytest
import torch
import torch.nn.functional as F
from conftest import SCALES, SHAPES, TINY, tiny_model

from model import GPT, ModelConfig, rotary_table, rotate
from norms import ScaleConfig, ScaleVector, fold_, rms_norm


def norm(x, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def times(x, scale):
    return x if scale is None else x * scale


def reference_attention(block, x, eps):
    """Attention with every scale vector on the activations, as the formulas of the table read."""
    attention, (B, T, _) = block.attention, x.shape
    value, placement = attention.scales.value, attention.scales.config.attention_placement

    def branch(name, linear):
        gamma = value(f"gamma_{name}") if f"gamma_{name}" in attention.scales else value("gamma")
        y = times(norm(x, eps), gamma) @ linear.weight.T
        y = times(y, value(f"u_{name}")) if placement == "dual" else y
        y = y.view(B, T, -1, attention.head_dim)
        if placement == "dual_norm":
            u = value(f"u_{name}")
            return times(norm(y, eps), u.view(-1, attention.head_dim) if u is not None else None)
        return times(norm(y, eps), value(f"norm_{name}")) if name != "v" and attention.qk_norm else y

    q, k, v = (branch(name, getattr(attention, name)) for name in "qkv")
    table = rotary_table(T, attention.head_dim, 10000.0, x.device)
    q, k = rotate(q, table), rotate(k, table)
    repeats = attention.n_head // attention.n_kv_head
    k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / attention.head_dim**0.5
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf"))
    y = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).reshape(B, T, -1)
    return y @ attention.o.weight.T


def reference_feedforward(block, x, eps):
    feedforward = block.feedforward
    value, placement = feedforward.scales.value, feedforward.scales.config.feedforward_placement

    def branch(name, linear):
        gamma = value(f"gamma_{name}") if f"gamma_{name}" in feedforward.scales else value("gamma")
        y = times(norm(x, eps), gamma) @ linear.weight.T
        return times(norm(y, eps) if placement == "dual_norm" else y, value(f"u_{name}"))

    y = F.silu(branch("gate", feedforward.gate)) * branch("up", feedforward.up)
    return y @ feedforward.down.weight.T


def reference_logits(model, idx):
    """The whole model, scale vectors on the activations, no fused matmul, no library norm or attention."""
    eps = model.config.norm_eps
    x = model.embedding.weight[idx]
    for block in model.blocks:
        y = reference_attention(block, x, eps)
        x = x + (times(norm(y, eps), block.scales.value("post_attention")) if block.post_norm else y)
        y = reference_feedforward(block, x, eps)
        x = x + (times(norm(y, eps), block.scales.value("post_feedforward")) if block.post_norm else y)
    gamma = model.scales.value("gamma_head") if "gamma_head" in model.scales else model.scales.value("gamma")
    return (times(norm(x, eps), gamma) @ model.head.weight.T)[..., : model.config.vocab_size]


def relative(a, b):
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-300)).item()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", SCALES)
def test_scaled_weights_equal_scaled_activations(scale, shape, tokens, generator):
    model = tiny_model(scale, generator, **SHAPES[shape])
    targets = tokens.roll(-1, 1)
    expected = reference_logits(model, tokens)
    assert relative(model(tokens)[0], expected) < 1e-12

    loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten())
    expected_gradients = torch.autograd.grad(loss, list(model.parameters()))
    largest = max(gradient.abs().max() for gradient in expected_gradients)
    assert relative(model(tokens, targets)[1], loss) < 1e-12
    model(tokens, targets)[1].backward()
    for (name, parameter), expected_gradient in zip(model.named_parameters(), expected_gradients):
        assert parameter.grad is not None, name
        # β before a norm has a gradient of nearly 0, a difference of large numbers: its scale is that of the others
        scale = max(expected_gradient.abs().max(), 1e-2 * largest)
        assert (parameter.grad - expected_gradient).abs().max() < 1e-12 * scale, name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", SCALES)
def test_folding_leaves_the_function(scale, shape, tokens, generator):
    model = tiny_model(scale, generator, **SHAPES[shape])
    before = model(tokens)[0]
    vectors = [module for module in model.modules() if isinstance(module, ScaleVector)]
    values = [vector().detach().clone() for vector in vectors]
    fold_(model)
    assert relative(model(tokens)[0], before) < 1e-12
    for vector, value in zip(vectors, values):
        if vector.role == "input_scale":
            assert (vector() == 1).all()
            assert not (value == 1).any()  # it was folded, not already 1
        else:
            assert (vector() == value).all()


def test_a_tied_head_is_untied_before_folding(tokens, generator):
    model = tiny_model("hg", generator, tied=True)
    before = model(tokens)[0]
    with pytest.warns(UserWarning, match="tied"):
        fold_(model)
    assert not model.tied
    assert relative(model(tokens)[0], before) < 1e-12


def test_inner_role_output_keeps_the_inner_norms_scales(tokens, generator):
    model = tiny_model(ScaleConfig(strategy="unified", inner_role="output"), generator)
    before = model(tokens)[0]
    kept = [module for module in model.modules() if isinstance(module, ScaleVector) and module.role == "output_scale"]
    assert len(kept) == 5 * TINY["n_layer"]  # u_q, u_k, u_v, u_gate, u_up
    fold_(model)
    assert relative(model(tokens)[0], before) < 1e-12
    assert all(not (vector() == 1).any() for vector in kept)


@pytest.mark.parametrize("scale", SCALES)
def test_every_vector_starts_at_one_and_every_strategy_at_the_same_function(scale, tokens):
    model = GPT(ModelConfig(**TINY), SCALES[scale])  # float32, as in training
    for module in model.modules():
        if isinstance(module, ScaleVector):
            assert (module() == 1).all()
    plain = GPT(ModelConfig(**TINY), ScaleConfig())
    same = torch.allclose(model(tokens)[0], plain(tokens)[0], atol=1e-6)
    assert same == ("dual_norm" not in (model.scale_config.attention_placement, model.scale_config.feedforward_placement))


def test_jacobian_of_or_at_the_start():
    """J Jᵀ = d ûûᵀ + (I - ûûᵀ): the magnitude direction learns d times faster, the rest as before."""
    d = 7
    vector = ScaleVector((d,), "or").double()
    vector.alpha.data.copy_(torch.tensor([1.0, 2.0, -1.0, 0.5, 3.0, 1.5, 1.0]))
    vector.alpha.data *= d**0.5 / vector.alpha.norm()  # any direction, at the first length √d

    def gamma(alpha, beta):
        return torch.func.functional_call(vector, {"alpha": alpha, "magnitude": beta}, ())

    jacobian = torch.cat(torch.autograd.functional.jacobian(gamma, (vector.alpha.data, vector.magnitude.data)), dim=1)
    u = vector.alpha.data / vector.alpha.data.norm()
    expected = d * torch.outer(u, u) + torch.eye(d) - torch.outer(u, u)
    assert torch.allclose(jacobian @ jacobian.T, expected, atol=1e-12)


@pytest.mark.parametrize("kind", ["or", "er"])
def test_only_the_direction_of_alpha_counts(kind, generator):
    vector = ScaleVector((3, 5), kind, "columns of w").double()
    vector.alpha.data.copy_(torch.randn(3, 5, generator=generator))
    before = vector().clone()
    vector.alpha.data *= torch.tensor([[2.0], [0.1], [7.0]])
    assert torch.allclose(vector(), before, atol=1e-13)
    length = vector().norm(dim=-1) / 5**0.5
    assert torch.allclose(length, torch.ones(3, dtype=torch.float64))  # β = 1: root mean square 1, each of the stack


def test_statistics_are_float32_for_low_precision():
    x = torch.full((1, 4096), 300.0, dtype=torch.bfloat16)  # squares and their sum overflow nothing, round nothing
    assert rms_norm(x, 0.0).eq(1).all()
