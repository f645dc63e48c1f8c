"""moe.py: the fast paths against the loop, against the dense block and against transformers; balance; the traps."""

import shutil

import pytest
import torch
import torch.nn.functional as F

import moe as moe_file
from model import GPT, FeedForward, ModelConfig, parameter_count
from moe import MoE, MoEConfig, Routing, load_statistics, update_balance_
from norms import STRATEGIES, ScaleConfig, ScaleVector, fold_

D_MODEL, EPS = 16, 1e-6
SHAPE = dict(n_layer=2, n_head=2, d_model=D_MODEL, vocab_size=61, block_size=16)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors this small gain nothing from threads that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def perturb_(module, seed: int = 1):
    """Matrices of useful size and scale vectors away from 1, as after training."""
    draw = generator(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        parameter.data = noise.mul(0.3).add(1.0 if "scales" in name else 0.0).to(parameter.dtype)
    return module


def build(strategy: str = "unified", dtype=torch.float64, kind: str | None = None, **moe) -> MoE:
    scale = ScaleConfig(strategy=strategy, kind=kind).resolved()
    return perturb_(MoE(D_MODEL, EPS, MoEConfig(**{"n_expert": 6, "d_ff": 8, **moe}), scale).to(dtype))


def tokens(batch: int = 2, length: int = 20, dtype=torch.float64, d_model: int = D_MODEL) -> torch.Tensor:
    return torch.randn(batch, length, d_model, generator=generator(2), dtype=torch.float64).to(dtype)


def values_and_gradients(function, module, x) -> dict[str, torch.Tensor]:
    """y, every field of the routing, and the gradient of both of x and of every parameter."""
    x = x.clone().requires_grad_()
    y, routing = function(x)
    target = torch.randn(y.shape, generator=generator(3), dtype=torch.float64).to(y.dtype)
    names, parameters = zip(*module.named_parameters())
    gradients = torch.autograd.grad((y * target).sum() + routing.auxiliary_loss, (x, *parameters))
    assert not any(gradient is None for gradient in gradients)
    return {"y": y, **routing._asdict(), **dict(zip(("x", *names), gradients))}


def assert_close(first: dict, second: dict, tolerance: float) -> None:
    assert first.keys() == second.keys()
    for name in first:
        scale = 1 + second[name].abs().max()
        assert (first[name] - second[name]).abs().max() <= tolerance * scale, name


# Cases of the batch: (batch, length, what is added to the bias of the experts)
CASES = {
    "usual": (2, 20, {}),
    "empty experts": (2, 20, {1: -9.0, 5: -9.0}),
    "one token": (1, 1, {}),
    "all to the same": (2, 20, {0: 9.0, 2: 8.0, 3: 7.0, 4: 6.0}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("top_k", (1, 2, 3, 4))
@pytest.mark.parametrize(
    "matmul, dtype, tolerance", [("each", torch.float64, 1e-10), ("grouped_mm", torch.float32, 1e-5)]
)
def test_fast_paths_equal_the_loop(matmul, dtype, tolerance, top_k, case):
    if matmul == "grouped_mm" and not moe_file.grouped_mm_is_right("cpu", dtype):
        pytest.skip("no grouped_mm for this dtype here")
    batch, length, bias = CASES[case]
    module = build("unified", dtype, matmul=matmul, top_k=top_k, n_shared=1, renormalize=top_k % 2 == 0)
    for expert, value in bias.items():
        module.router.balance_bias[expert] = value
    x = tokens(batch, length, dtype)
    fast = values_and_gradients(module, module, x)
    assert_close(fast, values_and_gradients(module.reference, module, x), tolerance)
    assert fast["load"].sum() == batch * length * top_k
    if case == "all to the same":
        assert (fast["load"] > 0).sum() == top_k
    for expert in (fast["load"] == 0).nonzero().flatten():  # zero, and not None
        assert not any(fast[f"experts.{name}.weight"][expert].any() for name in ("gate", "up", "down"))
        assert not any(fast[f"scales.{name}.alpha"][expert].any() for name in ("gamma_gate", "u_gate", "u_up"))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("n_shared", (0, 2))
def test_every_strategy_equals_the_loop(strategy, n_shared):
    module = build(strategy, n_shared=n_shared)
    x = tokens()
    assert_close(values_and_gradients(module, module, x), values_and_gradients(module.reference, module, x), 1e-10)


def test_auto_falls_back_for_float64_and_unaligned_widths():
    x = torch.zeros(4, 16)
    assert not moe_file.grouped_mm_is_right("cpu", torch.float64)
    assert moe_file.expert_matmul("auto", x.double(), 8) is moe_file.each_mm
    assert moe_file.expert_matmul("auto", x, 6) is moe_file.each_mm
    if moe_file.grouped_mm_is_right("cpu", torch.float32):
        assert moe_file.expert_matmul("auto", x, 8) is moe_file.grouped_mm


def test_a_wrong_gradient_of_empty_groups_is_noticed(monkeypatch):
    def unwritten(x, weight, load):
        y = moe_file.each_mm(x, weight, load)
        return y + 0 * (weight - weight.detach()).sum() * torch.nan  # the gradient of every weight becomes NaN

    monkeypatch.setattr(moe_file, "grouped_mm", unwritten)
    assert not moe_file.try_grouped_mm.__wrapped__("cpu", torch.float32)
    monkeypatch.setattr(moe_file, "grouped_mm", moe_file.each_mm)
    assert moe_file.try_grouped_mm.__wrapped__("cpu", torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bfloat16_on_a_gpu_equals_the_loop():
    module = build("unified", torch.float32, top_k=2, n_shared=1, d_ff=16).cuda()
    module.router.balance_bias[1] = -9.0
    x = tokens(4, 64, torch.float32).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        fast, loop = (function(x) for function in (module, module.reference))
    assert (fast[0] - loop[0]).abs().max() <= 2e-2 * loop[0].abs().max()
    assert torch.equal(fast[1].load, loop[1].load)


# Against the dense block and against transformers


def dense_and_copy(strategy: str, kind: str | None, into: str) -> tuple[FeedForward, MoE]:
    """A dense block, and a MoE whose one routed, or one shared, expert has its parameters."""
    config = ModelConfig(**SHAPE, d_ff=8).resolved()
    dense = perturb_(FeedForward(config, ScaleConfig(strategy=strategy, kind=kind).resolved()).double(), seed=7)
    moe = build(strategy, kind=kind, n_expert=1, top_k=1, n_shared=int(into == "shared"))
    own = dict(moe.named_parameters())
    own["experts.down.weight"].data.zero_()
    prefix, module = ("shared_", "shared.") if into == "shared" else ("", "experts.")
    for name, parameter in dense.named_parameters():
        name = name.replace("gate", prefix + "gate").replace("up", prefix + "up") if "scales" in name else module + name
        own[name].data = parameter.data.clone().view_as(own[name])
    return dense, moe


@pytest.mark.parametrize("into", ("experts", "shared"))
@pytest.mark.parametrize(
    "strategy, kind", [(name, None) for name in STRATEGIES] + [("hg_dnp", "centred"), ("dnp", "none")]
)
def test_one_expert_is_the_dense_block(strategy, kind, into):
    dense, moe = dense_and_copy(strategy, kind, into)
    x = tokens().requires_grad_()
    expected, (y, _) = dense(x), moe(x)
    assert (y - expected).abs().max() <= 1e-12
    names, parameters = zip(*dense.named_parameters())
    (expected * expected).sum().backward()
    (y * y).sum().backward()
    own = dict(moe.named_parameters())
    for name, parameter in zip(names, parameters):
        if "scales" not in name:
            gradient = own[f"{into}.{name}"].grad[0]
            assert (gradient - parameter.grad).abs().max() <= 1e-11 * (1 + parameter.grad.abs().max())


def test_shared_experts_add_up():
    both, expected = build("hg_dnp", n_shared=2), 0
    both.experts.down.weight.data.zero_()
    for s in range(2):
        one = build("hg_dnp", n_shared=1)
        for name, parameter in one.named_parameters():
            source = both.get_parameter(name).data
            parameter.data = source[s : s + 1] if "shared" in name else source
        expected = expected + one(tokens())[0]
    assert (both(tokens())[0] - expected).abs().max() <= 1e-12


def copy_from_transformers(block, moe: MoE) -> None:
    state = dict(block.named_parameters())
    gate, up = state["experts.gate_up_proj"].data.chunk(2, dim=1)  # (E, 2 d_ff, d_model)
    moe.router.linear.weight.data = state["gate.weight"].data.clone()
    moe.experts.gate.weight.data, moe.experts.up.weight.data = gate.clone(), up.clone()
    moe.experts.down.weight.data = state["experts.down_proj"].data.clone()


@pytest.mark.parametrize("family, renormalize", [("mixtral", True), ("qwen3_moe", True), ("qwen3_moe", False)])
def test_equals_the_block_of_transformers(family, renormalize):
    pytest.importorskip("transformers")
    sizes = dict(hidden_size=D_MODEL, num_attention_heads=2, num_key_value_heads=2, num_experts_per_tok=2)
    if family == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock as Block

        config = MixtralConfig(**sizes, intermediate_size=8, num_local_experts=6)
    else:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock as Block

        config = Qwen3MoeConfig(**sizes, moe_intermediate_size=8, num_experts=6, norm_topk_prob=renormalize)
    block = perturb_(Block(config).double(), seed=4)
    moe = build("none", top_k=2, renormalize=renormalize)
    if "experts.gate_up_proj" not in dict(block.named_parameters()):
        pytest.skip("this version of transformers keeps its experts apart")
    copy_from_transformers(block, moe)
    x = tokens()
    expected = block(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert (moe(x)[0] - expected).abs().max() <= 1e-6 * expected.abs().max()  # its softmax is float32


# Scale vectors: roles, starting values, folding


def expected_roles(scale: ScaleConfig) -> dict[str, str]:
    """The design's table, for the block's own scale vectors with shared experts."""
    if scale.kind == "none":
        return {}
    branches = ("router", "gate", "up", "shared_gate", "shared_up")
    names = [f"gamma_{branch}" for branch in branches] if scale.heterogeneous else ["gamma"]
    roles = dict.fromkeys(names, "input_scale")
    if scale.feedforward_placement != "input":
        roles |= dict.fromkeys(("u_gate", "u_up", "u_shared_gate", "u_shared_up"), "input_scale")
    if scale.feedforward_placement == "dual_norm":
        roles |= dict.fromkeys(("u_gate", "u_shared_gate"), "output_scale")
    return roles


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_roles_shapes_and_starting_values(strategy):
    scale = ScaleConfig(strategy=strategy).resolved()
    module = MoE(D_MODEL, EPS, MoEConfig(n_expert=6, d_ff=8, n_shared=2), scale)
    assert {name: vector.role for name, vector in module.scales.items()} == expected_roles(scale)
    for name, vector in module.scales.items():
        width = 8 if name.startswith("u_") else D_MODEL
        stack = () if name in ("gamma", "gamma_router") else (2,) if "shared" in name else (6,)
        assert vector.shape == (*stack, width)
        assert torch.equal(vector(), torch.ones(vector.shape))
    owners = [(name, owner) for name, owner in module.named_modules() if hasattr(owner, "parameter_roles")]
    roles = {f"{name}.{local}": role for name, owner in owners for local, role in owner.parameter_roles().items()}
    assert roles.keys() == dict(module.named_parameters()).keys()
    matrices = {name: role for name, role in roles.items() if not name.startswith("scales")}
    assert matrices.pop("router.linear.weight") == "router"
    assert set(matrices.values()) == {"matrix"} and len(matrices) == 6


def test_heterogeneous_experts_have_independent_vectors():
    module = build("unified")
    before, _ = module(tokens())
    weights, experts, _ = module.router(tokens().flatten(0, 1))
    module.scales["gamma_up"].alpha.data[3] *= torch.linspace(0.5, 2, D_MODEL)
    moved = (module(tokens())[0] - before).flatten(0, 1).abs().amax(-1) > 0
    assert torch.equal(moved, (experts == 3).any(-1))


@pytest.mark.parametrize("inner_role", ("fold", "output"))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_folding_leaves_the_function(strategy, inner_role):
    scale = ScaleConfig(strategy=strategy, inner_role=inner_role)
    model = perturb_(GPT(ModelConfig(**SHAPE), scale, MoEConfig(n_expert=6, d_ff=8, n_shared=2)).double())
    idx = torch.randint(61, (2, 16), generator=generator())
    vectors = [module for module in model.modules() if isinstance(module, ScaleVector)]
    expected = [torch.ones_like(v()) if v.role == "input_scale" else v().clone() for v in vectors]
    before, _ = model(idx)
    change = (fold_(model)(idx)[0] - before).abs().max() / before.abs().max()
    assert change <= 1e-12
    assert all(torch.equal(vector(), value) for vector, value in zip(vectors, expected))


@pytest.mark.parametrize(
    "strategy, per_expert", [("plain", 0), ("hg", 2 * 16), ("dp", 2 * 8), ("unified", 2 * 17 + 2 * 9)]
)
def test_idle_parameters(strategy, per_expert):
    module = build(strategy, n_expert=6, top_k=2, n_shared=6)  # as many shared ones, which are never idle
    assert module.idle_parameters() == 4 * (3 * D_MODEL * 8 + per_expert)
    model = GPT(ModelConfig(**SHAPE), ScaleConfig(strategy=strategy), MoEConfig(n_expert=6, d_ff=8))
    assert parameter_count(model) - parameter_count(model, active=True) == 2 * 4 * (3 * D_MODEL * 8 + per_expert)


# Router and balance


def test_router_follows_its_equations():
    module = build("hg", top_k=2, balance_coefficient=0.5, z_coefficient=0.25)
    x = tokens().flatten(0, 1)
    module.router.balance_bias += torch.tensor([0.0, 0.3, 0.0, -0.2, 0.0, 0.0])
    logits = (x * module.scales.value("gamma_router")) @ module.router.linear.weight.T
    scores = logits.softmax(-1)
    chosen = (scores + module.router.balance_bias).topk(2).indices
    weights, experts, routing = module.router(x)
    assert torch.equal(experts, chosen) and not torch.equal(chosen, scores.topk(2).indices)
    expected = scores.gather(1, chosen)  # without the bias
    assert torch.allclose(weights, expected / expected.sum(1, keepdim=True), rtol=1e-12)
    load = torch.stack([(chosen == e).sum() for e in range(6)])
    balance = 6 * (load / load.sum() * scores.mean(0)).sum()
    z = torch.log(logits.exp().sum(1)).square().mean()
    assert torch.equal(routing.load, load) and routing.load.dtype == torch.int64
    assert torch.allclose(routing.balance_loss, balance, rtol=1e-12)
    assert torch.allclose(routing.auxiliary_loss, 0.5 * balance + 0.25 * z, rtol=1e-12)
    assert torch.allclose(routing.entropy, -(scores * scores.log()).sum(1).mean(), rtol=1e-12)
    assert [field.requires_grad for field in routing] == [True, False, False, False]


def test_an_indifferent_router_has_balance_loss_one():
    module = build("none")
    module.router.linear.weight.data.zero_()
    _, routing = module(tokens())
    assert torch.allclose(routing.balance_loss, torch.ones((), dtype=torch.float64))
    assert torch.allclose(routing.entropy, torch.tensor(6.0, dtype=torch.float64).log())


@pytest.mark.parametrize("coefficients", [(0.1, 0.0), (0.0, 0.1), (0.0, 0.0)])
def test_auxiliary_loss_reaches_the_router_alone(coefficients):
    balance, z = coefficients
    module = build("unified", balance_coefficient=balance, z_coefficient=z, n_shared=1)
    _, routing = module(tokens())
    routing.auxiliary_loss.backward()
    reached = {name for name, p in module.named_parameters() if p.grad is not None and p.grad.any()}
    router = {"router.linear.weight", "scales.gamma_router.alpha", "scales.gamma_router.magnitude"}
    assert reached == (router if any(coefficients) else set())


@pytest.mark.parametrize("top_k, renormalize, learns", [(1, True, False), (1, False, True), (2, True, True)])
def test_renormalizing_a_single_weight_stops_the_router_learning(top_k, renormalize, learns):
    config = dict(top_k=top_k, renormalize=renormalize)
    module = build("plain", **config, balance_coefficient=0.0, z_coefficient=0.0)
    y, _ = module(tokens())
    y.square().sum().backward()
    gradient = module.router.linear.weight.grad.abs().max()
    assert gradient > 1e-3 if learns else gradient < 1e-13
    assert bool(MoEConfig(**config).notices()) != learns


def test_router_is_float32_under_autocast():
    module = build("unified", torch.float32)
    x = tokens(dtype=torch.float32)
    expected, _ = module(x)
    logits = module.router.logits(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module.router.logits(x), logits)
        y, routing = module(x)
        loop, _ = module.reference(x)
    assert y.dtype == torch.bfloat16 and routing.auxiliary_loss.dtype == torch.float32
    assert (y - loop).abs().max() <= 2e-2 * loop.abs().max()
    assert (y - expected).abs().max() <= 5e-2 * expected.abs().max()
    assert module.router.logits(x.bfloat16()).dtype == torch.float32
    (y.float().square().sum() + routing.auxiliary_loss).backward()


def test_update_balance_is_deepseeks():
    model = GPT(ModelConfig(**SHAPE), moe=MoEConfig(n_expert=4, d_ff=8, bias_rate=0.5))
    update_balance_(model, torch.tensor([[5, 1, 3, 3], [0, 0, 0, 8]]))
    update_balance_(model, torch.tensor([[4, 2, 3, 3], [2, 2, 2, 2]]))
    first, second = (block.feedforward.router.balance_bias for block in model.blocks)
    assert first.dtype == torch.float32 and first.tolist() == [-1.0, 1.0, 0.0, 0.0]
    assert second.tolist() == [0.5, 0.5, 0.5, -0.5]
    assert torch.equal(model.state_dict()["blocks.0.feedforward.router.balance_bias"], first)
    with pytest.raises(ValueError, match="1 layers given, the model has 2"):
        update_balance_(model, torch.zeros(1, 4))


@pytest.mark.parametrize("rate", (0.005, 0.0))
def test_balance_bias_evens_out_the_load(rate):
    module = build("plain", bias_rate=rate)
    x = tokens(4, 128).flatten(0, 1) + 1.0  # a common direction makes favourites

    def load():
        with torch.no_grad():
            return module.router(x)[2].load[None]

    before = load_statistics(load())
    for _ in range(200):
        update_balance_(module, load())
    after = load_statistics(load())
    assert before[0] > 2.0
    assert (after[0] < 1.15 and after[1] > 0.85) if rate else after == before


def test_load_statistics_and_stack():
    assert load_statistics(torch.tensor([[4, 4, 4, 4], [2, 6, 1, 7]])) == (1.75, 0.25)
    module = build()
    _, routing = module(tokens())
    stacked = Routing.stack([routing, routing])
    assert stacked.load.shape == (2, 6)
    assert stacked.auxiliary_loss.shape == (2,) and stacked.auxiliary_loss.requires_grad
    assert Routing.stack([]) is None


# The traps: what must not change, be counted twice, or show up in the loss


def gpt(n_layer: int = 2, **moe) -> tuple[GPT, torch.Tensor, torch.Tensor]:
    shape = ModelConfig(**{**SHAPE, "n_layer": n_layer})
    model = perturb_(GPT(shape, ScaleConfig(strategy="unified"), MoEConfig(n_expert=6, d_ff=8, **moe)))
    idx = torch.randint(61, (4, 17), generator=generator())
    return model, idx[:, :-1], idx[:, 1:]


def step(model, idx, targets) -> Routing:
    """Forward and backward of the training objective."""
    _, loss, routing = model(idx, targets, with_routing=True)
    (loss + routing.auxiliary_loss.sum()).backward()
    return routing


@pytest.mark.parametrize("checkpointing", (False, True))
@pytest.mark.parametrize("train", (False, True))
def test_forward_and_backward_change_no_state(train, checkpointing):
    model, idx, targets = gpt()
    model.train(train).activation_checkpointing = checkpointing
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    losses = [model(idx, targets)[1] for _ in range(2)]  # evaluated twice
    step(model, idx, targets)
    assert torch.equal(*losses) and torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_load_is_exact_under_checkpointing_and_accumulation():
    model, idx, targets = gpt(top_k=2)
    whole = step(model, idx, targets)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.activation_checkpointing = True
    again = step(model, idx, targets)
    for parameter, gradient in zip(model.parameters(), gradients):
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)
    parts = sum(step(model, *micro).load for micro in zip(idx.split(1), targets.split(1)))
    assert torch.equal(again.load, whole.load) and torch.equal(parts, whole.load)
    assert whole.load.sum(1).tolist() == [2 * idx.numel()] * 2
    update_balance_(model, parts)
    biases = torch.stack([block.feedforward.router.balance_bias for block in model.blocks])
    assert biases.abs().max() == torch.tensor(0.001)  # one step, not two
    assert torch.equal(biases.sign(), (parts.sum(1, True) - 6 * parts).sign())


@pytest.mark.parametrize("train", (False, True))
@pytest.mark.parametrize("checkpointing", (False, True))
def test_reported_loss_has_no_balance_term(train, checkpointing):
    model, idx, targets = gpt(balance_coefficient=100.0, z_coefficient=100.0)
    model.train(train).activation_checkpointing = checkpointing
    logits, _ = model(idx)
    loss = model(idx, targets)[1]
    assert torch.allclose(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten()), atol=1e-5)
    assert torch.equal(loss, model(idx, targets, with_routing=True)[1])
    assert model(idx, targets, with_routing=True)[2].auxiliary_loss.sum() > 100


def test_compiled_model_has_the_same_loss_gradients_and_load():
    """Of the whole model, the tracing alone: what it is compiled to is the next test's."""
    model, *_ = gpt(n_layer=1, n_shared=1)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for seed in range(2):  # other loads the second time
        idx = torch.randint(61, (4, 16), generator=generator(seed))
        results = []
        for function in (model, compiled):
            model.zero_grad()
            routing = step(function, idx, idx)
            results.append([routing.load, *(parameter.grad.clone() for parameter in model.parameters())])
        assert all(torch.allclose(value, other, atol=1e-5, rtol=1e-4) for value, other in zip(*results))


@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="torch.compile needs a C++ compiler")
def test_compiled_block_has_the_same_gradients():
    """Gradients too: shared experts as one batched matmul had the right value and, compiled, wrong gradients."""
    module = build("dnp", torch.float32, n_shared=1)
    torch.compiler.reset()
    x = tokens(dtype=torch.float32)
    expected = values_and_gradients(module, module, x)
    assert_close(values_and_gradients(torch.compile(module), module, x), expected, 1e-5)


# Config


@pytest.mark.parametrize(
    "given, field",
    [
        ({"n_expert": 0}, "n_expert"),
        ({"n_expert": 4, "top_k": 5}, "top_k"),
        ({"top_k": 0}, "top_k"),
        ({"d_ff": 0}, "d_ff"),
        ({"n_shared": -1}, "n_shared"),
        ({"balance_coefficient": -0.1}, "balance_coefficient"),
        ({"z_coefficient": -0.1}, "z_coefficient"),
        ({"bias_rate": -0.1}, "bias_rate"),
    ],
)
def test_config_problems(given, field):
    problems = MoEConfig(**given).problems()
    assert [(name, value) for name, _, value in problems] == [(field, given[field])]


def test_config_lists_every_problem_and_the_default_has_none():
    assert MoEConfig().problems() == [] and MoEConfig().notices() == []
    assert MoEConfig(n_expert=3, top_k=3).problems() == []
    names = [name for name, _, _ in MoEConfig(n_expert=2, top_k=3, d_ff=0, bias_rate=-1.0).problems()]
    assert sorted(names) == ["bias_rate", "d_ff", "top_k"]


def test_demonstration_drops_no_token(capsys):
    moe_file.main()
    printed = capsys.readouterr().out
    assert "1024 tokens x 2 choices, 2048 routed, 0 dropped" in printed
    busiest = [float(line.split()[1]) for line in printed.split("updates")[1].splitlines()[1:]]
    assert busiest[0] > 2 and busiest[-1] < 1.1
