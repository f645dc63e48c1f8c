"""Roles, decay policies, schedules, Muon, and optimizer state by name."""

import copy
import json
import math
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, SCALES, SHAPES, tiny_model
from torch import nn

import optim
from norms import ScaleConfig
from optim import (
    POLICIES,
    Muon,
    OptimConfig,
    Optimizers,
    RoleError,
    muon_factor,
    newton_schulz,
    parameter_roles,
    role_table,
    schedule,
    treatment,
    warmup_steps,
)

# the table of roles: last part of a scale vector's name -> what it folds into, and so its role, by placement
INPUT, OUTPUT = "input_scale", "output_scale"
EXPECTED = {
    "input": {"gamma": INPUT},
    "dual": {"gamma": INPUT, "u": INPUT},
    "dual_norm": {"gamma": INPUT, "u_q": OUTPUT, "u_k": OUTPUT, "u_v": INPUT, "u_gate": OUTPUT, "u_up": INPUT},
}


def expected_role(vector, placement):
    if vector.startswith(("norm_", "post_")):
        return OUTPUT
    table = EXPECTED[placement]
    return table.get(vector) or table[vector.split("_")[0]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", SCALES)
def test_roles_are_those_of_the_design(scale, shape):
    model = tiny_model(scale, **SHAPES[shape])
    for name, role in parameter_roles(model).items():
        if ".scales." not in f".{name}":
            assert role == {"embedding.weight": "embedding", "head.weight": "head"}.get(name, "matrix")
            continue
        *path, vector, parameter = name.split(".")
        placements = model.scale_config.attention_placement, model.scale_config.feedforward_placement
        placement = placements[0] if "attention" in path else placements[1]
        assert role == ("direction" if parameter == "alpha" else expected_role(vector, placement)), name


def test_expected_vectors_exist():
    names = {name.removeprefix("blocks.0.").rsplit(".", 1)[0] for name in parameter_roles(tiny_model("unified", post_norm=True))}
    vectors = {name.split("scales.")[1] for name in names if "scales" in name and not name.startswith("blocks")}
    attention = {f"gamma_{x}" for x in "qkv"} | {f"u_{x}" for x in "qkv"}
    feedforward = {"gamma_gate", "gamma_up", "u_gate", "u_up"}
    assert vectors == attention | feedforward | {"post_attention", "post_feedforward", "gamma_head"}


def test_inner_role_output():
    roles = parameter_roles(tiny_model(ScaleConfig(strategy="hg_dnp", inner_role="output")))
    assert {roles[f"blocks.0.{part}.gamma"] for part in ("attention.scales.u_v", "feedforward.scales.u_up")} == {OUTPUT}


def test_a_tied_matrix_has_one_role_and_one_place():
    table = role_table(tiny_model("plain", tied=True), OptimConfig())
    assert "head" not in table["roles"] and table["roles"]["embedding"]["tensors"] == 1


def test_a_parameter_without_role_or_with_two_stops():
    model = tiny_model("plain")
    model.extra = nn.Linear(2, 2, bias=False)
    with pytest.raises(RoleError, match="extra.weight"):
        parameter_roles(model)
    model = tiny_model("plain")
    model.head.weight = model.embedding.weight  # owned twice
    with pytest.raises(RoleError, match="embedding.weight"):
        parameter_roles(model)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scale", ["plain", "unified", "er", "centred"])
def test_policies_decay_what_they_say(scale, policy, generator):
    """One step with zero gradient moves exactly the parameters that decay."""
    model = tiny_model(scale, generator, qk_norm=True, post_norm=True)
    before = copy.deepcopy(dict(model.named_parameters()))
    optimizers = Optimizers(model, OptimConfig(learning_rate=0.1, scale_decay=policy))
    optimizers.set_rate(1.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step()
    for name, role in parameter_roles(model).items():
        decays = role in ("matrix", "embedding", "head") or role in {
            "iwd": (INPUT,), "all": (INPUT, OUTPUT), "none": (), "reverse": (OUTPUT,)}[policy]  # fmt: skip
        expected = before[name] * (1 - 0.1 * 0.1) if decays else before[name]
        assert torch.allclose(model.get_parameter(name), expected, rtol=1e-14, atol=0), name


def test_iwd_equals_all_on_a_plain_model():
    tables = [role_table(tiny_model("plain"), OptimConfig(scale_decay=policy)) for policy in ("iwd", "all")]
    assert tables[0] == tables[1]


def test_multipliers_reach_their_role():
    optimizers = Optimizers(tiny_model("plain"), OptimConfig(learning_rate=1.0, multiplier_input_scale=3.0))
    optimizers.set_rate(0.5)
    rates = {group["role"]: group["lr"] for optimizer in optimizers.all for group in optimizer.param_groups}
    assert rates == {"matrix": 0.5, "embedding": 0.5, "head": 0.5, "input_scale": 1.5}


# ---------------------------------------------------------------------------------- schedule


def curve(steps=100, **keys):
    config = OptimConfig(**keys)
    return [schedule(step, config, steps) for step in range(steps)]


def test_cosine():
    rates = curve(schedule="cosine", warmup=0.1, final_rate=0.1)
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3]) and rates[9] == 1.0 == rates[10]
    assert rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:]))
    middle = 10 + (99 - 10) / 2
    assert (rates[int(middle)] + rates[int(middle) + 1]) / 2 == pytest.approx(0.55, abs=1e-3)


@pytest.mark.parametrize("shape", ["linear", "1-sqrt"])
def test_wsd(shape):
    rates = curve(schedule="wsd", warmup=0.02, decay_share=0.2, decay_shape=shape)
    assert rates[0] == 0.5 and set(rates[1:80]) == {1.0} and rates[80] == 1.0 and rates[81] < 1.0
    expected = 0.5 if shape == "linear" else 1 - math.sqrt(0.5)
    assert rates[90] == pytest.approx(expected) and 0 < rates[99] < 0.06


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_phases_of_length_zero(kind):
    for warmup in (0.0, 1.0):
        for decay_share in (0.0, 1.0) if warmup == 0 else (0.0,):
            for steps in (1, 2, 7):
                rates = curve(steps, schedule=kind, warmup=warmup, decay_share=decay_share)
                assert all(0 <= rate <= 1 for rate in rates) and rates[0] > 0
    assert warmup_steps(OptimConfig(warmup=0.01), 5) == 1 and warmup_steps(OptimConfig(warmup=0.0), 5) == 0


# -------------------------------------------------------------------------------------- Muon


def singular_values(matrix):
    return torch.linalg.svdvals(newton_schulz(matrix, 5))


def test_newton_schulz_singular_values(generator):
    for rows, columns in ((16, 16), (64, 64), (256, 256), (64, 128), (128, 64), (32, 300)):
        wild = torch.randn(3, rows, columns, generator=generator)
        assert singular_values(wild).max() <= 1.3
        square = rows == columns
        if square:  # condition number 20
            u, _, v = torch.linalg.svd(wild, full_matrices=False)
            wild = u * torch.logspace(0, math.log10(1 / 20), rows) @ v
        values = singular_values(wild)
        assert values.min() >= 0.6 and values.max() <= 1.3, (rows, columns)


def test_newton_schulz_batched_equals_one_by_one(generator):
    matrices = torch.randn(4, 24, 16, generator=generator)
    one_by_one = torch.cat([newton_schulz(matrix[None], 5) for matrix in matrices])
    assert torch.allclose(newton_schulz(matrices, 5), one_by_one, atol=1e-5)
    assert (newton_schulz(torch.zeros(1, 4, 4), 5) == 0).all()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rule", ["match_adamw", "spectral"])
def test_muon_equals_torchs(rule, nesterov, generator, monkeypatch):
    """With one orthogonaliser in both, five steps agree; with each its own (torch's is bfloat16), one step nearly."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon to compare with")
    theirs_module = sys.modules["torch.optim._muon"]
    shapes = [(12, 8), (8, 12), (12, 8), (6, 6)]
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(5)]

    def both(steps):
        adjust = {"match_adamw": "match_rms_adamw", "spectral": "original"}[rule]
        results = []
        for make in (
            lambda p: Muon(p, lr=0.05, weight_decay=0.1, nesterov=nesterov, scale=rule),
            lambda p: torch.optim.Muon(p, lr=0.05, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust),
        ):
            parameters = [nn.Parameter(value.clone()) for value in start]
            optimizer = make(parameters)
            for step in range(steps):
                for parameter, gradient in zip(parameters, gradients[step]):
                    parameter.grad = gradient.clone()
                optimizer.step()
            results.append(parameters)
        return max((a - b).abs().max().item() for a, b in zip(*results))

    assert both(1) < 5e-2
    monkeypatch.setattr(theirs_module, "_zeropower_via_newtonschulz", lambda g, *_: newton_schulz(g[None], 5)[0])
    assert both(5) < 1e-5


def test_muon_takes_matrices_only_and_q_k_v_apart():
    optimizers = Optimizers(tiny_model("unified"), OptimConfig(optimizer="muon"))
    muon, adamw = optimizers.all[1], optimizers.all[0]
    names = [name for group in muon.param_groups for name in group["names"]]
    assert {name.split(".")[-2] for name in names} == {"q", "k", "v", "o", "gate", "up", "down"}
    assert {group["role"] for group in adamw.param_groups} == {"embedding", "head", INPUT, OUTPUT, "direction"}
    assert treatment("head", OptimConfig(optimizer="muon")).optimizer == "adamw"


def test_muon_stacks_are_batches(generator):
    """A stack of experts is updated as its matrices one by one."""
    stack = nn.Parameter(torch.randn(3, 10, 6, generator=generator))
    singles = [nn.Parameter(stack[i].detach().clone()) for i in range(3)]
    stack.grad = torch.randn(3, 10, 6, generator=generator)
    for i, single in enumerate(singles):
        single.grad = stack.grad[i].clone()
    Muon([stack], lr=0.1).step()
    Muon(singles, lr=0.1).step()
    assert torch.allclose(stack, torch.stack(list(singles)), atol=1e-5)
    assert muon_factor(100, 25, "spectral") == 2.0 and muon_factor(100, 25, "match_adamw") == 2.0


# ------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_state_goes_by_name(optimizer, generator, tokens):
    """Saved, loaded into a fresh model and stepped: the same, bit for bit."""
    config = OptimConfig(optimizer=optimizer, learning_rate=0.01)

    def step(model, optimizers):
        optimizers.set_rate(1.0)
        model(tokens, tokens.roll(-1, 1))[1].backward()
        optimizers.step()
        optimizers.zero_grad()

    model = tiny_model("unified", generator)
    optimizers = Optimizers(model, config)
    step(model, optimizers)
    twin = copy.deepcopy(model)
    state = copy.deepcopy(optimizers.state())
    assert set(state) == {name for name, _ in model.named_parameters()}
    fresh = Optimizers(twin, config)
    fresh.load_state(state)
    for _ in range(2):
        step(model, optimizers)
        step(twin, fresh)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))


# ----------------------------------------------------------------------------------- command


def run_optim(*arguments):
    return subprocess.run([sys.executable, "optim.py", *arguments], cwd=ROOT, capture_output=True, text=True)


def test_json_alone_on_stdout():
    result = run_optim("configs/baseline_1b.py", "--json")
    table = json.loads(result.stdout)
    assert (table["parameters"], table["scale_parameters"]) == (1_028_065_024, 80_640)
    assert "4800 is the nearest" in result.stderr and result.stderr.count("4778") == 1
    assert table["roles"]["input_scale"]["optimizer"] == "adamw" and table["roles"]["input_scale"]["decay"] == 0.1
    assert sum(role["count"] for role in table["roles"].values()) == table["parameters"]


def test_the_table_as_text_and_bad_keys():
    assert "direction" in run_optim("configs/unified_2b.py").stdout
    result = run_optim("configs/baseline_120m.py", "--optim.learning_rat=1")
    assert result.returncode == 2 and "optim.learning_rate" in result.stderr and "Traceback" not in result.stderr


