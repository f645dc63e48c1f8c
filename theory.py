"""Is the mathematics true?

A scale vector γ in front of a matrix W acts through the effective matrix W̃ = W diag(γ), whose column
j is w̃_j = γ_j w_j. Every statement below is about W̃, in float64, over many seeded random draws:

    folding        W Norm(x) with W <- W diag(γ) is the same function: an input scale adds no expressivity
    dynamics       dw̃_j/dt = -P_j ∂L/∂w̃_j,   P_j = γ_j² I + w_j w_jᵀ    (without γ: P_j = I)
    conservation   γ_j² - ‖w_j‖² stays what it was, so growing weights raise γ_j, and P_j's eigenvalues
    two sides      W̃_ij = u_i W_ij v_j descends faster by Σ_i ⟨row i of W, row i of ∂L/∂W̃⟩²
    two branches   separate γ gain Σ_f a_f² - (Σ_f a_f)², where a_f is branch f's pull on γ
    direction      γ = β √d α/‖α‖ learns its magnitude d times faster, the rest as before
    decay          on an input γ it lowers the sharpness in W; on an output γ it takes reach away

Each check returns a measured number, the bound it must keep and a counter-example: the same code
with a wrong formula or a broken assumption, which must fail, so that no check is one that cannot.
The paper's own assumptions are not all public. So each docstring here gives our statement and its proof.

Try it: `python theory.py --plots out/theory`, then change a line in `preconditioner` and run it again.
"""

import argparse
import contextlib
import functools
import json
import math
import operator
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, jacrev, jvp, vmap
from tqdm import tqdm

from model import GPT, ModelConfig
from moe import MoEConfig
from norms import STRATEGIES, ScaleConfig, ScaleVector, fold_, rms_norm

# --------------------------------------------------------------------------------------------------
# The table of checks, and how one is judged

RELATIONS = {"<=": operator.le, ">=": operator.ge}


class Outcome(NamedTuple):
    """What a check found: `measured` must keep `relation` to `bound`, and `counter_example` must not."""

    measured: Tensor | float
    bound: Tensor | float
    counter_example: Tensor | float


class Check(NamedTuple):
    name: str
    claim: str
    relation: str
    function: Callable[[], Outcome]


CHECKS: list[Check] = []
PICTURES: dict[str, tuple[str, int, Callable]] = {}  # file name: title, number of panels, function(axes)


def check(claim: str, relation: str):
    """Enters the function below in the table of checks, under its own name."""

    def enter(function):
        CHECKS.append(Check(function.__name__, claim, relation, function))
        return function

    return enter


def picture(title: str, panels: int = 2):
    """Enters a function that draws on `panels` matplotlib axes in the table of pictures."""

    def enter(function):
        PICTURES[function.__name__.removeprefix("picture_")] = (title, panels, function)
        return function

    return enter


def label(axis, title: str, x: str, y: str, **more) -> None:
    """Title and axis labels; `more` goes to matplotlib's Axes.set."""
    axis.set(title=title, xlabel=x, ylabel=y, **more)


def judge(one: Check) -> dict:
    """Runs one check and returns its row, in the format of the JSON file."""
    measured, bound, counter = (float(torch.as_tensor(value).detach()) for value in one.function())
    if not all(map(math.isfinite, (measured, bound, counter))):
        raise FloatingPointError(f"{one.name}: measured {measured}, bound {bound}, counter-example {counter}")
    keeps = RELATIONS[one.relation]
    return {
        "name": one.name,
        "claim": one.claim,
        "measured": measured,
        "relation": one.relation,
        "bound": bound,
        "holds": keeps(measured, bound),
        "counter_example": {"measured": counter, "holds": keeps(counter, bound)},
    }


# --------------------------------------------------------------------------------------------------
# Shared machinery. Draws are the first dimension everywhere; W is (draws, rows, columns), γ (draws, columns)


def normal_numbers(seed: int) -> Callable[..., Tensor]:
    """A function of a shape that draws standard normal numbers, float64, from its own generator."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def scaled(weight: Tensor, columns: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
    """W̃_ij = u_i W_ij v_j, the effective matrix."""
    weight = weight if columns is None else weight * columns.unsqueeze(-2)
    return weight if rows is None else weight * rows.unsqueeze(-1)


def matrix_dot(a: Tensor, b: Tensor) -> Tensor:
    """Σ_ij a_ij b_ij of each draw."""
    return (a * b).sum((-2, -1))


def relative_error(given: Tensor, expected: Tensor) -> Tensor:
    """Largest |given - expected| over largest |expected|, over everything."""
    return (given - expected).abs().max() / expected.abs().max()


def gradients(loss: Callable, parameters: list[Tensor]) -> tuple[Tensor, ...]:
    """∂loss/∂parameters. loss -> (draws,); draws do not touch each other, so one backward pass serves all."""
    leaves = [parameter.detach().requires_grad_() for parameter in parameters]
    return torch.autograd.grad(loss(*leaves).sum(), leaves)


def identity(gradient: Tensor) -> Tensor:
    return gradient


def descent_rate(loss: Callable, parameters: list[Tensor], update=identity) -> Tensor:
    """-dL/dt where every parameter moves by -update(its gradient): (draws,)."""
    parts = [(g * update(g)).flatten(1).sum(1) for g in gradients(loss, parameters)]
    return torch.stack(parts).sum(0)


def flow(loss: Callable, start: list[Tensor], step: float, steps: int, decay=None, update=identity, euler=False):
    """dθ/dt = -update(∂L/∂θ) - decay θ by Runge-Kutta of order 4 (or Euler): the list of states.

    loss(*parameters) -> (draws,); decay: one rate a parameter. A state is a list like `start`.
    """
    decay = decay or [0.0] * len(start)

    def velocity(state):
        return [-update(g) - rate * p for g, rate, p in zip(gradients(loss, state), decay, state)]

    def moved(state, velocities, time):
        return [p + time * v for p, v in zip(state, velocities)]

    trajectory = [list(start)]
    for _ in range(steps):
        state = trajectory[-1]
        first = velocity(state)
        if euler:
            trajectory.append(moved(state, first, step))
            continue
        second = velocity(moved(state, first, step / 2))
        third = velocity(moved(state, second, step / 2))
        fourth = velocity(moved(state, third, step))
        mean = [(a + 2 * b + 2 * c + d) / 6 for a, b, c, d in zip(first, second, third, fourth)]
        trajectory.append(moved(state, mean, step))
    return trajectory


def adam(loss: Callable, start: list[Tensor], rate: float, steps: int) -> list[list[Tensor]]:
    """The states under PyTorch's Adam, betas 0.9 and 0.95; it works element by element, so draws stay apart."""
    parameters = [p.clone().requires_grad_() for p in start]
    optimizer = torch.optim.Adam(parameters, lr=rate, betas=(0.9, 0.95))
    trajectory = [list(start)]
    for _ in range(steps):
        optimizer.zero_grad()
        loss(*parameters).sum().backward()
        optimizer.step()
        trajectory.append([p.detach().clone() for p in parameters])
    return trajectory


def losses(loss: Callable, trajectory: list[list[Tensor]]) -> Tensor:
    """The loss at every state: (states, draws)."""
    return torch.stack([loss(*state).detach() for state in trajectory])


def regression(effective: Tensor, target: Tensor, covariance: Tensor) -> Tensor:
    """½ tr (W̃ - M) Σ (W̃ - M)ᵀ: a linear map that learns M from inputs of covariance Σ."""
    error = effective - target
    return 0.5 * matrix_dot(error @ covariance, error)


def neural_loss(effective: Tensor, inputs: Tensor, target: Tensor) -> Tensor:
    """½ ‖tanh(x W̃ᵀ) - y‖² over the tokens: a loss in which nothing is linear."""
    return 0.5 * matrix_dot(*[torch.tanh(inputs @ effective.mT) - target] * 2)


def largest_eigenvalue(gradient: Callable, point: Tensor, normal: Callable, steps: int = 20) -> Tensor:
    """Largest eigenvalue of each draw's Hessian by Lanczos on Hessian-vector products: (draws,).

    gradient: point -> its gradient, both (draws, ...); the product is its directional derivative.
    """
    basis = F.normalize(normal(point.shape[0], 1, point[0].numel()), dim=-1)  # (draws, steps so far, numbers)
    diagonal, beside = [], []
    for _ in range(steps):
        newest = basis[:, -1]
        product = jvp(gradient, (point,), (newest.view_as(point),))[1].flatten(1)
        diagonal.append((product * newest).sum(-1))
        for _ in range(2):  # orthogonalized twice: once loses digits
            product = product - ((basis @ product.unsqueeze(-1)).mT @ basis).squeeze(1)
        beside.append(product.norm(dim=-1))
        basis = torch.cat((basis, F.normalize(product, dim=-1).unsqueeze(1)), dim=1)
    off = torch.diag_embed(torch.stack(beside[:-1], -1), 1)
    return torch.linalg.eigvalsh(torch.diag_embed(torch.stack(diagonal, -1)) + off + off.mT)[:, -1]


def best_fit_residual(function: Callable, target: Tensor, starts: list[list[Tensor]], steps: int = 150) -> Tensor:
    """Smallest ‖function(parameters) - target‖ / ‖target‖ that L-BFGS reaches from any of the starts: (draws,)."""
    best = []
    for start in starts:
        parameters = [p.clone().requires_grad_() for p in start]
        optimizer = torch.optim.LBFGS(
            parameters, max_iter=steps, tolerance_grad=1e-12, tolerance_change=1e-15, line_search_fn="strong_wolfe"
        )

        def residual():
            return (function(*parameters) - target).flatten(1).norm(dim=1) / target.flatten(1).norm(dim=1)

        def closure():
            optimizer.zero_grad()
            total = residual().square().sum()
            total.backward()
            return total

        optimizer.step(closure)
        best.append(residual().detach())
    return torch.stack(best).amin(0)


# --------------------------------------------------------------------------------------------------
# 1. Expressivity: an input scale folds, an output scale does not


def random_model(seed: int, strategy: str, moe: MoEConfig | None = None, **shape) -> tuple[GPT, Tensor]:
    """A small GPT in float64 whose every parameter is away from its start, and token ids for it."""
    shape = {"n_layer": 3, "n_head": 4, "n_kv_head": 2, "d_model": 32, "d_ff": 48, "vocab_size": 61} | shape
    model = GPT(ModelConfig(block_size=16, vocab_multiple=1, **shape), ScaleConfig(strategy=strategy), moe).double()
    normal, generator = normal_numbers(seed), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data *= 1 + 0.3 * normal(*parameter.shape)
    return model, torch.randint(shape["vocab_size"], (2, 16), generator=generator)


@torch.no_grad()
def function_values(model: GPT, idx: Tensor) -> Tensor:
    """Logits and loss as one vector."""
    return torch.cat((model(idx)[0].flatten(), model(idx, idx.roll(-1, 1))[1].view(1)))


def reset_scales_(model: GPT, role: str) -> None:
    """Sets every scale vector of a role to 1, and nothing else."""
    for module in model.modules():
        if isinstance(module, ScaleVector) and module.role == role:
            module.reset_()


def change_by_folding(strategies, also_output=False, moe: MoEConfig | None = None, **shape) -> float:
    """Largest relative change of logits and loss when all input scales are folded, over seeds and strategies."""
    worst = 0.0
    for seed, strategy in enumerate(list(strategies) * 3):
        model, idx = random_model(seed, strategy, moe, **shape)
        before = function_values(model, idx)
        fold_(model)
        if also_output:
            reset_scales_(model, "output_scale")
        worst = max(worst, relative_error(function_values(model, idx), before).item())
    return worst


@check("dense model: logits and loss stay when every input scale folds", "<=")
def expressivity_dense():
    """Our statement: a Pre-Norm model with any input scales equals one in which all of them are 1.

    Proof: 1. W (v ⊙ Norm(x)) = (W diag(v)) Norm(x), and u ⊙ (W y) = (diag(u) W) y. 2. u behind an inner
    norm on values or `up` passes softmax's weighted sum, or the product with silu(gate), into the
    columns of the next matrix. 3. Each is a matrix of the same shape, so layer by layer all are absorbed.
    Counter-example: the output scales set to 1 as well, as if they folded too.
    """
    sandwich = {"post_norm": True, "qk_norm": True}
    measured = max(change_by_folding(STRATEGIES), change_by_folding(STRATEGIES, **sandwich))
    return Outcome(measured, 1e-11, change_by_folding(["plain"], also_output=True, **sandwich))


@check("mixture of experts: logits and loss stay when input scales fold", "<=")
def expressivity_mixture_of_experts():
    """Our statement: as `expressivity_dense`; the router and every expert read the norm as linear maps do.

    Proof: 1. The router's logits R (γ ⊙ n) = (R diag(γ)) n are the same numbers, so the same experts are
    chosen. 2. Each expert is a SwiGLU and folds as one. 3. Their weighted sum has no scale of its own.
    """
    moe = MoEConfig(n_expert=6, top_k=2, n_shared=1, d_ff=24)
    measured = change_by_folding(STRATEGIES, moe=moe)
    return Outcome(measured, 1e-11, change_by_folding(["unified"], also_output=True, moe=moe))


def independence(weight: Tensor) -> Tensor:
    """Smallest over largest singular value of the map γ² -> Wᵀ diag(γ²) W; 0 if some γ² is mapped to 0.

    weight: (draws, rows, columns). The map's matrix has the rank-one matrices w_i w_iᵀ as its rows.
    """
    outer = (weight.unsqueeze(-1) * weight.unsqueeze(-2)).flatten(2)  # (draws, rows, columns²)
    values = torch.linalg.svdvals(outer)
    enough = outer.shape[1] <= weight.shape[2] * (weight.shape[2] + 1) // 2
    return values[:, -1] / values[:, 0] if enough else torch.zeros(len(weight), dtype=weight.dtype)


def hidden_scale(weight: Tensor) -> Tensor:
    """A scale γ that is not uniform and yet leaves ‖γ ⊙ Wx‖ = ‖Wx‖ for all x; needs dependent w_i w_iᵀ."""
    outer = (weight.unsqueeze(-1) * weight.unsqueeze(-2)).flatten(2)
    null = torch.linalg.svd(outer.mT)[2][:, -1]  # Σ_i null_i w_i w_iᵀ = 0
    return (1 + 0.9 * null / null.abs().amax(-1, keepdim=True)).sqrt()


@check("γ not uniform: ‖γ ⊙ Wx‖/‖Wx‖ varies with x: smallest singular value", ">=")
def expressivity_rank():
    """Our statement: γ ⊙ Norm(Wx) = c Norm(W'x) for all x with some W', c, exactly if Wᵀ diag(γ²) W = c² WᵀW.

    Proof (eps 0): 1. The right side has norm c √rows for every x, the left √rows ‖γ ⊙ Wx‖/‖Wx‖; equal squares
    for all x is the condition. 2. Given it, W' = diag(γ) W serves. 3. If the w_i w_iᵀ are independent (rank =
    rows), Σ_i (γ_i² - c²) w_i w_iᵀ = 0 leaves |γ| = c alone: sizes up to columns (columns + 1)/2 rows, almost surely.
    Measured: the independence for post-norm (square, onto) and gate (tall) shapes. Counter-example: more rows than
    columns (columns + 1)/2, where scales that are not uniform do fold.
    """
    normal = normal_numbers(1)
    shapes = [(6, 6), (8, 4), (5, 9)]
    measured = min(independence(normal(100, *shape)).min() for shape in shapes)
    return Outcome(measured, 1e-6, independence(normal(100, 5, 2)).max())


def post_norm_fit(gamma: Tensor, weight: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Best-fit residual of c Norm(W'x) to γ ⊙ Norm(Wx), and its lower bound std ‖y‖ / rms ‖y‖: (draws,) each."""

    def block(radius, matrix):
        return radius[:, None, None] * rms_norm(inputs @ matrix.mT, 0.0)

    target = gamma.unsqueeze(1) * rms_norm(inputs @ weight.mT, 0.0)
    norms = target.norm(dim=-1)
    bound = norms.var(dim=1, correction=0).sqrt() / norms.square().mean(1).sqrt()
    radius = ones(len(gamma))
    return best_fit_residual(block, target, [[radius, weight], [radius, scaled(weight, rows=gamma)]]), bound


@check("post-norm: best fit without γ leaves at least the spread of ‖y‖", ">=")
def expressivity_post_norm():
    """Our statement: any function of the form c Norm(h(x)) misses y = γ ⊙ Norm(Wx) by Var ‖y‖ in mean square.

    Proof (eps 0): 1. ‖c Norm(h)‖ = c √d =: r for every x. 2. ‖y - c Norm(h)‖ ≥ | ‖y‖ - r |. 3. The mean of
    (‖y‖ - r)² is least at r = mean ‖y‖, where it is Var ‖y‖. With eps > 0 outputs of mean square m have norm
    √d (1 + eps/m)^-½, so the bound holds up to eps/2m. Here: W' and c fitted, on draws
    with |γ| not uniform; W' = diag(γ) W reaches the bound.
    Counter-example, the boundary: |γ| uniform with any signs, which diag(sign γ) W absorbs.
    """
    normal = normal_numbers(1)
    weight, inputs, gamma = normal(6, 6, 6), normal(6, 64, 6), (0.5 * normal(6, 6)).exp()
    residual, bound = post_norm_fit(gamma, weight, inputs)
    uniform, _ = post_norm_fit(normal(6, 6).sign(), weight, inputs)
    return Outcome(residual.min(), (1 - 1e-6) * bound.min(), uniform.max())


UNIFORM = 1.7  # a post-norm γ with all its entries equal


def change_by_embedding(uniform: bool, eps: float) -> float:
    """Relative change when all post-norm γ are set to 1 and the embedding is divided by their mean instead."""
    model, idx = random_model(1, "plain", post_norm=True, norm_eps=eps)
    vectors = [vector.gamma.data for block in model.blocks for vector in block.scales.values()]
    mean = torch.cat(vectors).mean()
    if uniform:
        for vector in vectors:
            vector.fill_(UNIFORM)
        mean = UNIFORM
    before = function_values(model, idx)
    model.embedding.weight.data /= mean
    for vector in vectors:
        vector.fill_(1.0)
    return relative_error(function_values(model, idx), before).item()


@check("boundary: one uniform post-norm γ = c scales away via the embedding", "<=")
def expressivity_post_norm_uniform():
    """Our statement: if every post-norm γ of the model is the same c, dividing the embedding by c replaces it.

    Proof (eps 0): 1. Let x = c x' hold before a block. 2. Norm(c x') = Norm(x'), so the sublayer's normalized
    output n is the same, and x + c n = c (x' + n). 3. By induction the last stream is c x', and the head reads
    Norm of it. Counter-example: the same exchange by the mean of a γ that is not uniform.
    """
    return Outcome(change_by_embedding(True, eps=0.0), 1e-11, change_by_embedding(False, eps=0.0))


@check("... and with eps = 1e-6 up to eps over the stream's mean square", "<=")
def expressivity_post_norm_eps():
    """As before with a positive eps: Norm(c x') = Norm(x') up to eps/(2 mean(x'²)) in each of the norms.

    The bound is our estimate: the embedding's mean square is init_std² = 0.02² · 768/32, c² times less after the
    division, and seven norms in a row contribute once each. Counter-example: eps 0.1, as large as the stream.
    """
    seven_norms = 7 * 1e-6 / (2 * 0.02**2 * 768 / 32 / UNIFORM**2)
    return Outcome(change_by_embedding(True, eps=1e-6), seven_norms, change_by_embedding(True, eps=0.1))


def query_key_scores(inputs: Tensor, query: Tensor, key: Tensor, scale: Tensor | None = None) -> Tensor:
    """Norm(W_q x_i)ᵀ diag(γ_q ⊙ γ_k) Norm(W_k x_j) for all pairs of tokens, at equal positions: (draws, i, j)."""
    queries, keys = (rms_norm(inputs @ matrix.mT, 0.0) for matrix in (query, key))
    return scaled(queries, scale) @ keys.mT


def key_length_violation(inputs: Tensor, query: Tensor, key: Tensor, scale: Tensor) -> Tensor:
    """How far keys must leave the sphere once the queries are held to it; 0 where that does not determine them.

    Solves q̂ᵀ G q̂ = h for G by least squares over the tokens, returns rms of k̂ᵀ D G⁻¹ D k̂ / h - 1: (draws,).
    """
    queries, keys = (rms_norm(inputs @ matrix.mT, 0.0) for matrix in (query, key))
    h = queries.shape[-1]
    i, j = torch.triu_indices(h, h)
    system = queries[..., i] * queries[..., j] * torch.where(i == j, 1.0, 2.0)  # (draws, tokens, h (h + 1) / 2)
    determined = torch.linalg.matrix_rank(system, rtol=1e-9) == system.shape[-1]
    upper = system.new_zeros(len(system), h, h)
    upper[:, i, j] = torch.linalg.pinv(system, rtol=1e-9) @ (h * ones(system.shape[1]))
    gram = upper.triu() + upper.triu(1).mT
    scaled_keys = scaled(keys, scale)
    length = (scaled_keys * (scaled_keys @ torch.linalg.pinv(gram, rtol=1e-9))).sum(-1) / h
    return (length - 1).square().mean(1).sqrt() * determined


@check("QK-norm: without γ keys would have to leave the sphere: rank argument", ">=")
def expressivity_query_key_rank():
    """Our statement: no W_q', W_k' give the scores q̂ᵀ D k̂, D = diag(γ_q ⊙ γ_k), unless |D| = I. A uniform D = c I,
    a temperature, does not fold either: scores without γ are at most h = head_dim (Cauchy-Schwarz).

    Proof (eps 0; W_q, W_k of rank h; equal positions, so rotation cancels): 1. The score matrix has rank h, so all its
    factors are (M q̂, M⁻ᵀ D k̂). 2. ‖M q̂‖² = h on h (h + 1)/2 independent q̂ q̂ᵀ leaves MᵀM = G = I. 3. Then keys
    have length ‖D k̂‖, which is √h for all k̂ on the sphere only if D² = I. (Softmax hides a term r(q) a query;
    both score functions are odd in k, so r = 0.) Counter-example, the boundary: D of signs.
    """
    normal = normal_numbers(1)
    inputs, query, key = normal(50, 64, 6), normal(50, 4, 6), normal(50, 4, 6)
    scale = (0.5 * normal(50, 4)).exp()
    scale[0] = 2  # a temperature
    measured = key_length_violation(inputs, query, key, scale).min()
    return Outcome(measured, 0.05, key_length_violation(inputs, query, key, scale.log().sign()).max())


@check("QK-norm: best fit of the scores with other W_q, W_k leaves a residual", ">=")
def expressivity_query_key():
    """The number to the argument before: relative residual of the best W_q', W_k' (L-BFGS from W_q, W_k and from
    diag(√|D|) W_q, diag(√|D|) W_k). Counter-example: D of signs, which W_q absorbs.
    """
    normal = normal_numbers(2)
    inputs, query, key = normal(6, 48, 6), normal(6, 4, 6), normal(6, 4, 6)

    def residual(scale):
        target, root = query_key_scores(inputs, query, key, scale), scale.abs().sqrt()
        starts = [[query, key], [scaled(query, rows=root * scale.sign()), scaled(key, rows=root)]]
        return best_fit_residual(lambda q, k: query_key_scores(inputs, q, k), target, starts)

    scale = (0.5 * normal(6, 4)).exp()
    return Outcome(residual(scale).min(), 0.05, residual(scale.log().sign()).max())


def gate_residual(scale: Tensor, inputs: Tensor, weights: list[Tensor]) -> Tensor:
    """Best fit of a SwiGLU with inner norms without u on the gate to one with it, all three matrices free: (draws,)."""

    def branch(gate, up, down, u=None):
        gated = F.silu(scaled(rms_norm(inputs @ gate.mT, 0.0), u))
        return (gated * rms_norm(inputs @ up.mT, 0.0)) @ down.mT

    gate, up, down = weights
    starts = [weights, [scaled(gate, rows=scale), up, down]]
    return best_fit_residual(branch, branch(*weights, scale), starts)


@check("u on the gate: best fit with all neighbouring matrices free fails", ">=")
def expressivity_gate():
    """Our statement: silu(u ⊙ Norm(Wx)) = silu(Norm(W'x)) for all x only if Wᵀ diag(u²) W = WᵀW; with independent
    w_i w_iᵀ (see `expressivity_rank`) only if |u| = 1, so a uniform u ≠ 1 does not fold either.

    Proof (eps 0, some x with Wx > 0): 1. silu is one to one on positive numbers, so u ⊙ Norm(Wx) = Norm(W'x) on an
    open set. 2. The squared norms there give the condition, as polynomials agree where they do on an open set. 3. As in
    `expressivity_rank`, with c = 1. W_up and W_down cannot mend it either: that part is measured, not proven.
    Counter-example, the boundary: 5 rows on 2 columns and a u, not uniform, in the map's null space: it folds.
    """
    normal = normal_numbers(1)
    inputs, weights, scale = normal(4, 128, 4), [normal(4, 6, 4), normal(4, 6, 4), normal(4, 3, 6)], normal(4, 6)
    scale = (0.6 * scale).exp()
    scale[0] = 2
    measured = gate_residual(scale, inputs, weights).min()
    inputs, weights = normal(4, 48, 2), [normal(4, 5, 2), normal(4, 5, 2), normal(4, 3, 5)]
    return Outcome(measured, 0.01, gate_residual(hidden_scale(weights[0]), inputs, weights).max())


def tied_asymmetry(embedding: Tensor, gamma: Tensor) -> Tensor:
    """Relative asymmetry of S_tt S_tv, S the logits of a model without blocks and with a tied head: (draws,)."""
    logits = rms_norm(embedding, 0.0) @ scaled(embedding, gamma).mT  # (draws, token before, token after)
    product = logits.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * logits
    return (product - product.mT).flatten(1).norm(dim=1) / product.flatten(1).norm(dim=1)


@check("tied head: a non-uniform γ gives logits no tied matrix gives", ">=")
def expressivity_tied():
    """Our statement: with one matrix E as embedding and head, no E' without γ has the logits of a non-uniform γ.

    Proof for 0 blocks, eps 0, d columns: 1. Without γ, S_tv = √d ⟨e'_t, e'_v⟩/‖e'_t‖. 2. So S_tt = √d ‖e'_t‖, and
    S_tt S_tv = d ⟨e'_t, e'_v⟩ is symmetric. 3. With γ it is d k_tt k_tv/‖e_t‖², k = E diag(γ) Eᵀ, symmetric only where
    k_tt/‖e_t‖² is the same for all tokens that overlap. Counter-example, the boundary: uniform γ (E' = γE serves).
    """
    normal = normal_numbers(1)
    embedding, gamma = normal(50, 20, 8), (0.5 * normal(50, 8)).exp()
    return Outcome(tied_asymmetry(embedding, gamma).min(), 0.03, tied_asymmetry(embedding, ones(50, 8) * 2).max())


@check("tied head: untied first, its γ folds like every other", "<=")
def expressivity_tied_fold():
    """Untying gives the head a matrix of its own, and `expressivity_dense` applies.

    Counter-example: γ folded into the matrix that the embedding reads too.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fold_ warns that it unties: that is what is checked
        measured = change_by_folding(["plain", "hg", "or"], tied=True)
    model, idx = random_model(1, "plain", tied=True)
    before = function_values(model, idx)
    model.head.weight.data.mul_(model.scales["gamma"]().detach())
    model.scales["gamma"].reset_()
    return Outcome(measured, 1e-11, relative_error(function_values(model, idx), before))


@picture("Input scales fold, output scales do not", panels=2)
def picture_expressivity(axes):
    """The sphere and the ellipsoid of a post-norm; what folding and dropping scales does to a GPT."""
    normal = normal_numbers(1)
    points = rms_norm(normal(1, 400, 2), 0.0)
    clouds = {"without γ: a circle": points, "γ = (1.6, 0.6): an ellipse": points * torch.tensor([1.6, 0.6])}
    for name, values in clouds.items():
        axes[0].scatter(*values[0].T, s=4, label=name)
    label(axes[0], "All outputs of a post-norm, width 2", "output 1", "output 2", aspect="equal", ylim=(-1.6, 2.6))
    axes[0].legend(loc="upper right")
    sandwich = {"post_norm": True, "qk_norm": True}
    bars = {
        "fold all input scales": change_by_folding(["plain"], **sandwich),
        "drop all output scales": change_by_folding(["plain"], also_output=True, **sandwich),
        "uniform post-norm γ\ninto the embedding": change_by_embedding(True, eps=0.0),
        "the same,\neps = 1e-6": change_by_embedding(True, eps=1e-6),
        "the same,\nγ not uniform": change_by_embedding(False, eps=0.0),
    }
    axes[1].barh(list(bars), [max(value, 1e-17) for value in bars.values()])  # an exact 0 still gets a bar
    label(axes[1], "What a small GPT's logits notice", "largest relative change (0 drawn as 1e-17)", "", xscale="log")
    axes[1].invert_yaxis()


# --------------------------------------------------------------------------------------------------
# 2. Effective dynamics


def preconditioner(gamma: Tensor, weight: Tensor, power: int = 2) -> Tensor:
    """P_j = γ_j² I + w_j w_jᵀ for every column j: (draws, columns, rows, rows). Any other power of γ is wrong."""
    column = weight.mT.unsqueeze(-1)  # (draws, columns, rows, 1)
    return gamma[..., None, None] ** power * torch.eye(weight.shape[-2], dtype=weight.dtype) + column @ column.mT


def apply_to_columns(matrices: Tensor, gradient: Tensor) -> Tensor:
    """Column j becomes P_j times column j: (draws, rows, columns)."""
    return torch.einsum("njab,nbj->naj", matrices, gradient)


def velocity_draws(draws: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random γ and W, dW̃/dt under gradient flow on (γ, W) by automatic differentiation of the flow, and ∂L/∂W̃."""
    normal = normal_numbers(2)
    gamma, weight, inputs, target = normal(draws, 6), normal(draws, 5, 6), normal(draws, 12, 6), normal(draws, 12, 5)

    def loss(effective):
        return neural_loss(effective, inputs, target)

    to_gamma, to_weight = gradients(lambda g, w: loss(scaled(w, g)), [gamma, weight])
    velocity = jvp(lambda g, w: scaled(w, g), (gamma, weight), (-to_gamma, -to_weight))[1]
    return gamma, weight, velocity, gradients(loss, [scaled(weight, gamma)])[0]


@check("dw̃_j/dt = -P_j ∂L/∂w̃_j with P_j = γ_j² I + w_j w_jᵀ", "<=")
def dynamics_preconditioner():
    """Our statement: under gradient flow on (γ, W), dw̃_j/dt = -P_j g_j, g_j = ∂L/∂w̃_j, for every loss.

    Proof: 1. ∂L/∂w_j = γ_j g_j and ∂L/∂γ_j = ⟨w_j, g_j⟩. 2. dw̃_j/dt = γ_j dw_j/dt + w_j dγ_j/dt. 3. Put in:
    -γ_j² g_j - w_j ⟨w_j, g_j⟩ = -P_j g_j. Counter-example: the formula P = γ I + w wᵀ.
    """
    gamma, weight, velocity, gradient = velocity_draws(200)
    right, wrong = preconditioner(gamma, weight), preconditioner(gamma, weight, power=1)
    errors = [relative_error(-apply_to_columns(matrices, gradient), velocity) for matrices in (right, wrong)]
    return Outcome(errors[0], 1e-12, errors[1])


@check("eigenvalues of P_j: from γ_j² to γ_j² + ‖w_j‖² (more than one row)", "<=")
def dynamics_eigenvalues():
    """Our statement: with more than one row, λ_min(P_j) = γ_j² and λ_max(P_j) = γ_j² + ‖w_j‖².

    Proof: 1. P_j w_j = (γ_j² + ‖w_j‖²) w_j. 2. P_j z = γ_j² z for every z at right angles to w_j. 3. These are all
    rows directions. Counter-example: a matrix with one row, where there is no such z and λ_min is λ_max.
    """
    normal = normal_numbers(2)

    def error(rows):
        gamma, weight = normal(200, 6), normal(200, rows, 6)
        values = torch.linalg.eigvalsh(preconditioner(gamma, weight))
        smallest = gamma.square()
        largest = smallest + weight.square().sum(1)
        return max(relative_error(values[..., 0], smallest), relative_error(values[..., -1], largest))

    return Outcome(error(5), 1e-12, error(1))


@picture("The effective matrix moves by -P ∂L/∂W̃")
def picture_dynamics(axes):
    """Formula against automatic differentiation, for the right P and a wrong one."""
    gamma, weight, velocity, gradient = velocity_draws(20)
    for axis, power, name in zip(axes, (2, 1), ("P = γ² I + w wᵀ", "wrong: P = γ I + w wᵀ")):
        matrices = preconditioner(gamma, weight, power)
        axis.scatter(velocity.flatten(), -apply_to_columns(matrices, gradient).flatten(), s=5)
        axis.axline((0, 0), slope=1, color="black", linewidth=0.8)
        label(axis, name, "dW̃/dt by automatic differentiation", "dW̃/dt by the formula")


# --------------------------------------------------------------------------------------------------
# 3. Conservation and self-amplification


def balance(gamma: Tensor, weight: Tensor) -> Tensor:
    """γ_j² - ‖w_j‖², what the flow conserves: (draws, columns)."""
    return gamma.square() - weight.square().sum(-2)


def drift_ratio(quantity: Callable, update=identity) -> Tensor:
    """Drift of quantity(γ, W) up to time 1 with Euler steps of 0.01, over that with 0.005: (draws,)."""
    normal = normal_numbers(3)
    start = [1 + 0.3 * normal(50, 6), 0.5 * normal(50, 5, 6)]
    inputs, target = normal(50, 12, 6), normal(50, 12, 5)

    def loss(gamma, weight):
        return neural_loss(scaled(weight, gamma), inputs, target) / 12

    ends = [flow(loss, start, 1 / steps, steps, update=update, euler=True)[-1] for steps in (100, 200)]
    coarse, fine = ((quantity(*end) - quantity(*start)).norm(dim=-1) for end in ends)
    return coarse / fine


@check("drift of γ_j² - ‖w_j‖² halves as the step halves (|ratio - 2|)", "<=")
def conservation_drift_order():
    """Our statement: gradient flow conserves γ_j² - ‖w_j‖²; Euler steps of size h lose it at a rate of order h.

    Proof: 1. dγ_j²/dt = -2 γ_j ⟨w_j, g_j⟩ = d‖w_j‖²/dt. 2. One Euler step changes the difference by
    h² (⟨w_j, g_j⟩² - γ_j² ‖g_j‖²), the first order cancels. 3. T/h steps drift by O(h): half the step, half the drift.
    Counter-example: γ_j² + ‖w_j‖², which is not conserved; its change has nothing to do with the step (ratio 1).
    """
    not_conserved = drift_ratio(lambda gamma, weight: gamma.square() + weight.square().sum(-2))
    return Outcome((drift_ratio(balance) - 2).abs().max(), 0.1, (not_conserved - 2).abs().max())


def amplification_agreement(gamma: Tensor) -> Tensor:
    """Share of columns in which γ_j, ‖w_j‖ and both eigenvalues of P_j rise exactly where ⟨w_j, g_j⟩ < 0."""
    normal = normal_numbers(3)
    draws, columns = gamma.shape
    weight, inputs, target = normal(draws, 5, columns), normal(draws, 12, columns), normal(draws, 12, 5)

    def loss(effective):
        return neural_loss(effective, inputs, target)

    def quantities(gamma, weight):
        squared = weight.square().sum(1)
        return torch.stack((gamma, squared.sqrt(), gamma.square(), gamma.square() + squared))

    to_gamma, to_weight = gradients(lambda g, w: loss(scaled(w, g)), [gamma, weight])
    (gradient,) = gradients(loss, [scaled(weight, gamma)])
    rises = jvp(quantities, (gamma, weight), (-to_gamma, -to_weight))[1] > 0
    return (rises == ((weight * gradient).sum(1) < 0)).all(0).double().mean()


@check("γ_j rises exactly where ‖w_j‖ and P_j's eigenvalues do: share", ">=")
def conservation_self_amplification():
    """Our statement: for γ_j > 0, γ_j, ‖w_j‖ and both eigenvalues of P_j rise exactly where ⟨w_j, g_j⟩ < 0.

    Proof: 1. dγ_j/dt = -⟨w_j, g_j⟩. 2. d‖w_j‖²/dt = dγ_j²/dt = 2 γ_j dγ_j/dt has its sign. 3. So have γ_j² and
    γ_j² + ‖w_j‖². (P_j as a matrix need not rise in every direction, because w_j also turns.)
    Counter-example: γ_j < 0, where γ_j rises towards 0 while the weights shrink.
    """
    gamma = 0.1 + normal_numbers(33)(500, 6).abs()
    return Outcome(amplification_agreement(gamma), 1.0, amplification_agreement(-gamma))


@functools.cache
def pulled_back(column_norm: float) -> list[list[Tensor]]:
    """Trajectories of (γ, W) from γ = 1 and columns of a given norm, whose target is minus twice the start."""
    normal = normal_numbers(3)
    weight = column_norm * F.normalize(normal(30, 4, 6), dim=1)
    target = -2 * weight + 0.02 * normal(30, 4, 6)
    covariance = torch.eye(6, dtype=weight.dtype)
    return flow(lambda g, w: regression(scaled(w, g), target, covariance), [ones(30, 6), weight], 0.02, 400)


def smallest_eigenvalue(column_norm: float) -> Tensor:
    """Smallest λ_min(P_j) = γ_j² over draws, columns and times."""
    return min(gamma.square().min() for gamma, _ in pulled_back(column_norm))


@check("‖w_j(0)‖ = 0.8: λ_min(P_j) never below 1 - 0.8²", ">=")
def conservation_definite():
    """Our statement: from γ_j(0) = 1 and ‖w_j(0)‖ < 1, λ_min(P_j) ≥ 1 - ‖w_j(0)‖² > 0 for all time.

    Proof: 1. λ_min(P_j) = γ_j². 2. γ_j² = 1 - ‖w_j(0)‖² + ‖w_j‖² by conservation. 3. ‖w_j‖² ≥ 0. The target, minus
    twice the start, makes the bound tight. Counter-example: ‖w_j(0)‖ = 1.28, where γ_j reaches 0.
    """
    return Outcome(smallest_eigenvalue(0.8), 1 - 0.8**2 - 1e-6, smallest_eigenvalue(1.28))


# rows that read one norm in the 120m model: d_model 768, d_ff 2048, vocabulary padded to 50304
ROWS = {"q, k, v": (3 * 768, 768), "gate, up": (2 * 2048, 2048), "head": (50304, 50304)}  # shared γ, separate γ


@check("init of 120m: one γ for gate and up starts above column norm 1", ">=")
def conservation_initial_columns():
    """Our statement: a column of rows numbers of Normal(0, 0.02) has norm 0.02 √rows (relative spread 1/√(2 rows)).

    Proof: 1. ‖w‖² is a sum of rows squares of mean 0.02². 2. Its variance is 2 rows 0.02⁴. 3. Take the root. So for
    120m: gate and up behind one γ 1.28, above 1, the guarantee of `conservation_definite` is absent; q, k, v 0.96; the
    head 4.49. Counter-example: a γ of its own for each of gate and up, as in HG: 0.905, and the guarantee is back.
    """
    normal = normal_numbers(3)
    shared, separate = (0.02 * normal(rows, 768).norm(dim=0).mean() for rows in ROWS["gate, up"])
    return Outcome(shared, 1.0, separate)


@picture("γ² - ‖w‖² is conserved, so γ grows with the weights", panels=3)
def picture_conservation(axes):
    """Drift against step; γ from column norms below and above 1; the column norms of 120m."""
    normal = normal_numbers(3)
    start, inputs, target = [1 + 0.3 * normal(10, 6), 0.5 * normal(10, 5, 6)], normal(10, 12, 6), normal(10, 12, 5)
    counts = [25, 50, 100, 200, 400]
    steps = [1 / count for count in counts]

    def loss(gamma, weight):
        return neural_loss(scaled(weight, gamma), inputs, target) / 12

    ends = [flow(loss, start, 1 / count, count, euler=True)[-1] for count in counts]
    drift = [(balance(*end) - balance(*start)).norm(dim=-1).mean() for end in ends]
    axes[0].loglog(steps, drift, "o-", label="measured")
    axes[0].loglog(steps, [drift[0] * step / steps[0] for step in steps], "k--", label="slope 1")
    axes[0].set_xticks(steps, labels=steps)
    axes[0].minorticks_off()
    label(axes[0], "Drift of γ² - ‖w‖² up to time 1", "Euler step (time)", "drift (norm over columns)")
    for norm, colour in ((0.8, "C0"), (1.28, "C3")):
        values = torch.stack([gamma[0] for gamma, _ in pulled_back(norm)])
        axes[1].plot(0.02 * torch.arange(len(values)), values[:, 0], color=colour, label=f"‖w(0)‖ = {norm}")
    axes[1].axhline(0.6, color="C0", linestyle=":", label="bound √(1 - 0.8²)")
    axes[1].axhline(0, color="black", linewidth=0.8)
    label(axes[1], "γ when the target is -2 w(0)", "time of the flow", "γ of one column")
    places = torch.arange(len(ROWS))
    for shift, index, name in ((-0.2, 0, "one γ (plain)"), (0.2, 1, "a γ each (HG)")):
        axes[2].bar(places + shift, [0.02 * rows[index] ** 0.5 for rows in ROWS.values()], 0.4, label=name)
    axes[2].axhline(1, color="black", linestyle=":", label="guarantee ends")
    label(axes[2], "Column norm at init of 120m", "matrices that read one norm", "‖w_j(0)‖ = 0.02 √rows")
    axes[2].set_xticks(places, labels=list(ROWS))
    for axis in axes:
        axis.legend()


# --------------------------------------------------------------------------------------------------
# 4. With γ the loss falls at least as fast: at an instant always, over a curve sometimes


def effective_descent_ratio(gamma: Tensor, weight: Tensor, update=identity) -> Tensor:
    """-dL/dt with γ over -dL/dt without, at the same effective matrix: (draws,)."""
    normal = normal_numbers(4)
    draws, rows, columns = weight.shape
    inputs, target = normal(draws, 12, columns), normal(draws, 12, rows)

    def loss(effective):
        return neural_loss(effective, inputs, target)

    with_gamma = descent_rate(lambda g, w: loss(scaled(w, g)), [gamma, weight], update)
    return with_gamma / descent_rate(loss, [scaled(weight, gamma)], update)


@check("at γ_j ≥ 1 the loss falls at least as fast as without γ, same W̃", ">=")
def descent_instant():
    """Our statement: at the same W̃, -dL/dt with γ is at least min_j γ_j² times that without.

    Proof: 1. With γ, -dL/dt = Σ_j g_jᵀ P_j g_j. 2. P_j ≥ γ_j² I. 3. Without γ it is Σ_j ‖g_j‖². So γ_j ≥ 1 suffices.
    Counter-example: the same draws at γ_j in (0, ½] with small weights.
    """
    normal = normal_numbers(44)
    gamma, weight = 1 + normal(1000, 6).abs(), 0.3 * normal(1000, 5, 6)
    measured = effective_descent_ratio(gamma, weight).min()
    return Outcome(measured, 1.0, effective_descent_ratio(0.5 / gamma, weight).min())


def regression_task(case: str) -> tuple[Tensor, Tensor, Tensor]:
    """W(0), target M and input covariance Σ of 100 random linear regressions, condition number 100 (and 10)."""
    normal = normal_numbers(4)
    draws, rows, columns = (100, 1, 2) if case == "zero init, correlated" else (100, 4, 6)
    variances = torch.logspace(-1 if rows == 1 else -2, 0, columns, dtype=torch.float64)
    spread = torch.diag_embed(variances).expand(draws, -1, -1)
    turn = torch.linalg.qr(normal(draws, columns, columns))[0]
    correlated = turn @ spread @ turn.mT
    weight, target = 0.3 * normal(draws, rows, columns), normal(draws, rows, columns)
    return {
        "zero init, uncorrelated": (torch.zeros_like(weight), target, spread),
        "zero init, correlated": (torch.zeros_like(weight), 3 * target @ correlated, correlated),
        "random init, correlated": (weight, target, correlated),
        "target shrinks w": (weight, torch.zeros_like(weight), spread),
    }[case]


def train_twice(case: str, train: Callable) -> list[tuple[Tensor, list[list[Tensor]]]]:
    """The same task with γ = 1 and without: [(losses (states, draws), states)] of each."""
    weight, target, covariance = regression_task(case)

    def plain(gamma, weight):
        return regression(scaled(weight, gamma), target, covariance)

    def none(weight):
        return regression(weight, target, covariance)

    runs = (plain, [ones(weight.shape[0], weight.shape[-1]), weight]), (none, [weight])
    return [(losses(loss, states), states) for loss, states in ((loss, train(loss, start)) for loss, start in runs)]


@functools.cache
def flow_curves(case: str):
    """`train_twice` under gradient flow up to time 15."""
    return train_twice(case, lambda loss, start: flow(loss, start, 0.05, 300))


def worst_ratio(curves) -> Tensor:
    """Largest L with γ / L without γ while the latter is above 1e-4 of its start: (draws,)."""
    (with_gamma, _), (without, _) = curves
    return torch.where(without[1:] > 1e-4 * without[0], with_gamma[1:] / without[1:], 0.0).amax(0)


def crossing_share(curves) -> Tensor:
    """Share of the draws in which the curve with γ is once 5 % above the one without."""
    return (worst_ratio(curves) > 1.05).double().mean()


@check("zero init, uncorrelated inputs: below along the whole curve", "<=")
def descent_zero_init():
    """Our statement: regression, Σ diagonal (of any condition), W(0) = 0, γ(0) = 1: L with γ ≤ L without, always.

    Proof: 1. Columns are independent, and column j moves on the segment from 0 to m_j, in both cases. 2. Its length
    s obeys ds/dt = p σ_j (‖m_j‖ - s), with p = 1 without γ, and p = γ_j² + ‖w_j‖² ≥ γ_j² = 1 + ‖w_j‖² ≥ 1 with.
    3. So s with γ is never behind, and L = ½ Σ_j σ_j (‖m_j‖ - s_j)². Counter-example: a target that shrinks w.
    """
    measured = worst_ratio(flow_curves("zero init, uncorrelated")).max()
    return Outcome(measured, 1 + 1e-9, worst_ratio(flow_curves("target shrinks w")).max())


@check("zero init, CORRELATED inputs: curves cross, share of draws", ">=")
def descent_crossing_zero_init():
    """A negative result, ours: `descent_zero_init` fails once inputs are correlated, although γ_j ≥ 1 all the way.

    Why: 1. Take a target along Σ's fast direction: without γ the error shrinks straight along it. 2. P boosts
    some coordinates more than others and so leaks error into the slow direction. 3. The slow rest is there to stay.
    (One output, two inputs, M = random times Σ.) Counter-example: the same count with uncorrelated inputs.
    """
    zero = crossing_share(flow_curves("zero init, uncorrelated"))
    return Outcome(crossing_share(flow_curves("zero init, correlated")), 0.1, zero)


@check("random init, correlated inputs: curves cross, share of draws", ">=")
def descent_crossing_correlated():
    """A negative result, ours, as before from W(0) = 0.3 Normal: where a γ_j falls below 1, its column slows down."""
    zero = crossing_share(flow_curves("zero init, uncorrelated"))
    return Outcome(crossing_share(flow_curves("random init, correlated")), 0.03, zero)


@check("target shrinks w, uncorrelated inputs: curves cross, share of draws", ">=")
def descent_crossing_shrinking():
    """A negative result, ours: with target 0, γ_j falls with ‖w_j‖, to √(1 - ‖w_j(0)‖²) < 1, and the rate with it."""
    zero = crossing_share(flow_curves("zero init, uncorrelated"))
    return Outcome(crossing_share(flow_curves("target shrinks w")), 0.1, zero)


@check("... by how much: largest L with γ / L without, correlated", ">=")
def descent_crossing_correlated_amount():
    """Worst moment of the worst draw, while the loss without γ is above 1e-4 of its start."""
    zero = worst_ratio(flow_curves("zero init, uncorrelated")).max()
    return Outcome(worst_ratio(flow_curves("random init, correlated")).max(), 1.2, zero)


@check("... by how much: largest L with γ / L without, shrinking", ">=")
def descent_crossing_shrinking_amount():
    """As before, for the target that shrinks w."""
    zero = worst_ratio(flow_curves("zero init, uncorrelated")).max()
    return Outcome(worst_ratio(flow_curves("target shrinks w")).max(), 1.2, zero)


@picture("Loss with and without γ along gradient flow", panels=4)
def picture_descent(axes):
    """Three tasks' curves, and the γ of each input of the first."""
    names = ["zero init, uncorrelated", "zero init, correlated", "target shrinks w"]
    time = 0.05 * torch.arange(301)
    for axis, name in zip(axes, names):
        curves = flow_curves(name)
        draw = worst_ratio(curves).argmax()
        for (values, _), name_of_curve in zip(curves, ("with γ", "without γ")):
            axis.semilogy(time, values[:, draw] / values[0, draw], label=name_of_curve)
        title = f"{name}\nworst draw; {crossing_share(curves):.0%} of draws cross"
        label(axis, title, "time of the flow", "loss / loss at start")
        axis.legend()
    gamma = torch.stack([state[0][0] for state in flow_curves(names[0])[0][1]])
    for column in range(gamma.shape[1]):
        axes[3].plot(time, gamma[:, column], label=f"σ = {10 ** (-2 + 0.4 * column):.2g}")
    label(axes[3], f"{names[0]}\nγ of each input, by its variance σ", "time of the flow", "γ_j")
    axes[3].legend(bbox_to_anchor=(1, 1), loc="upper left")  # beside the curves, which fill the panel


# --------------------------------------------------------------------------------------------------
# 5. The preconditioner never reverses a gradient


def smallest_descent(matrices: Tensor, gradient: Tensor) -> Tensor:
    """Smallest ⟨P g, g⟩ / ‖g‖² over draws."""
    moved = (matrices @ gradient.unsqueeze(-1)).squeeze(-1)
    return ((moved * gradient).sum(-1) / gradient.square().sum(-1)).min()


@check("⟨P g, g⟩ ≥ 0 over 10⁴ draws, γ of any sign and 0 among them", ">=")
def never_reverses():
    """Our statement: ⟨P g, g⟩ ≥ 0 for every γ, w, g.

    Proof: gᵀ (γ² I + w wᵀ) g = γ² ‖g‖² + ⟨w, g⟩²: two squares. A thousandth of the draws have γ = 0.
    Counter-example: the formula P = γ I + w wᵀ, which reverses gradients at γ < 0.
    """
    normal = normal_numbers(5)
    gamma, weight, gradient = normal(10_000, 1), normal(10_000, 5, 1), normal(10_000, 1, 5)
    gamma[::1000] = 0
    right, wrong = preconditioner(gamma, weight), preconditioner(gamma, weight, power=1)
    return Outcome(smallest_descent(right, gradient), 0.0, smallest_descent(wrong, gradient))


@check("⟨P g, g⟩ / ‖g‖² ≥ γ² > 0 where γ ≠ 0 (here |γ| ≥ 0.1)", ">=")
def always_descends():
    """Our statement: ⟨P g, g⟩ ≥ γ² ‖g‖², so P strictly descends wherever γ ≠ 0.

    Proof: as before; the second square is not negative. Half of the gradients are at right angles to w, where
    it is 0 and the bound is tight. Counter-example: γ = 0, where those gradients do not move W̃ at all.
    """
    normal = normal_numbers(5)
    gamma, weight, gradient = normal(10_000, 1), normal(10_000, 5, 1), normal(10_000, 5)
    gamma = gamma.sign() * (0.1 + gamma.abs())
    unit = F.normalize(weight[..., 0], dim=-1)
    gradient[::2] -= ((gradient * unit).sum(-1, keepdim=True) * unit)[::2]
    measured = smallest_descent(preconditioner(gamma, weight), gradient.unsqueeze(1))
    without = smallest_descent(preconditioner(0 * gamma, weight), gradient.unsqueeze(1))
    return Outcome(measured, 0.1**2, without)


@picture("The angle between a gradient and what P makes of it", panels=1)
def picture_never_reverses(axes):
    """Angles between g and P g; none is above 90 degrees."""
    normal = normal_numbers(5)
    gamma, weight, gradient = normal(10_000, 1), normal(10_000, 5, 1), normal(10_000, 5)
    for power, name in ((2, "P = γ² I + w wᵀ"), (1, "wrong: P = γ I + w wᵀ")):
        moved = (preconditioner(gamma, weight, power)[:, 0] @ gradient.unsqueeze(-1)).squeeze(-1)
        angle = F.cosine_similarity(moved, gradient, dim=-1).clamp(-1, 1).acos().rad2deg()
        axes[0].hist(angle, bins=90, range=(0, 180), histtype="step", label=name)
    axes[0].axvline(90, color="black", linestyle=":", label="90°: beyond, the gradient is reversed")
    label(axes[0], "10⁴ random γ, w, g (5 rows)", "angle between g and P g (degrees)", "draws in a bin of 2°")
    axes[0].legend()


# --------------------------------------------------------------------------------------------------
# 6. Scales on both sides


def dual_gain(weight: Tensor, gradient: Tensor) -> Tensor:
    """Σ_i ⟨row i of W, row i of G⟩², by which scales on the rows speed descent up at u = v = 1: (draws,)."""
    return (weight * gradient).sum(-1).square().sum(-1)


def dual_rates(weight: Tensor, gradient: Tensor, u: float = 1.0, update=identity) -> tuple[Tensor, Tensor, Tensor]:
    """-dL/dt at one effective matrix `weight` with both sides, with columns only and with rows only: (draws,) each.

    The loss is ⟨G, W̃⟩, whose gradient is G wherever it is. u: what the rows' scale starts from.
    """
    rows, columns = u * ones(*weight.shape[:2]), ones(weight.shape[0], weight.shape[2])
    both = descent_rate(lambda w, v, u: matrix_dot(gradient, scaled(w, v, u)), [weight / u, columns, rows], update)
    one = descent_rate(lambda w, v: matrix_dot(gradient, scaled(w, v)), [weight, columns], update)
    other = descent_rate(lambda w, u: matrix_dot(gradient, scaled(w, rows=u)), [weight, ones(*rows.shape)], update)
    return both, one, other


@check("two sides gain exactly Σ_i ⟨W_i, G_i⟩² over the column side", "<=")
def dual_excess():
    """Our statement: at u = v = 1, -dL/dt of two sides exceeds that of columns alone by Σ_i ⟨row i of W, row i of G⟩².

    Proof: 1. ∂L/∂u_i = ⟨W_i, G_i⟩ at v = 1. 2. The gradients of W and v are the ones of the one-sided form, because
    u = 1. 3. -dL/dt is the sum of all squared gradients. Counter-example: the sum over columns instead of rows.
    """
    normal = normal_numbers(6)
    weight, gradient = normal(500, 5, 7), normal(500, 5, 7)
    both, one, _ = dual_rates(weight, gradient)
    gains = dual_gain(weight, gradient), dual_gain(weight.mT, gradient.mT)
    errors = [relative_error(both - one, gain) for gain in gains]
    return Outcome(errors[0], 1e-12, errors[1])


@check("from u = v = 1 two sides descend at least as fast as either one", ">=")
def dual_at_least_one_side():
    """Our statement: from u = v = 1, -dL/dt of two sides ≥ that of columns alone, and of rows alone, at the same W̃.

    Proof: `dual_excess` is a sum of squares, and the same with rows and columns exchanged.
    Counter-example: u = ½ at the same W̃ (so W doubled), with weights too small to make up for it.
    """
    normal = normal_numbers(6)
    weight, gradient = 0.3 * normal(500, 5, 7), normal(500, 5, 7)
    both, one, other = dual_rates(weight, gradient)
    started_low, _, _ = dual_rates(weight, gradient, u=0.5)
    return Outcome(torch.minimum(both / one, both / other).min(), 1.0, (started_low / one).min())


@check("equal exactly where every row of G is at right angles to W's row", "<=")
def dual_equal():
    """Our statement: the gain is 0 exactly if ⟨W_i, G_i⟩ = 0 for every row i; else two sides are strictly faster.

    Proof: a sum of squares is 0 exactly if each is. Measured: the largest relative gain over draws with
    the rows of G turned at right angles to W's. Counter-example: the draws as they were (smallest gain).
    """
    normal = normal_numbers(6)
    weight, gradient = normal(500, 5, 7), normal(500, 5, 7)
    unit = F.normalize(weight, dim=-1)
    turned = gradient - (gradient * unit).sum(-1, keepdim=True) * unit
    gains = [(both / one - 1).abs() for both, one, _ in (dual_rates(weight, g) for g in (turned, gradient))]
    return Outcome(gains[0].max(), 1e-12, gains[1].min())


@picture("Scales on both sides of a matrix")
def picture_dual(axes):
    """The gain against its formula; two sides against one."""
    normal = normal_numbers(6)
    weight, gradient = normal(300, 5, 7), normal(300, 5, 7)
    both, one, other = dual_rates(weight, gradient)
    axes[0].scatter(dual_gain(weight, gradient), both - one, s=6)
    axes[0].axline((0, 0), slope=1, color="black", linewidth=0.8)
    label(axes[0], "Gain of two sides over columns alone", "Σ_i ⟨W_i, G_i⟩²", "difference of -dL/dt (autodiff)")
    for ratio, name in ((both / one, "over columns alone"), (both / other, "over rows alone")):
        axes[1].hist(ratio, bins=40, histtype="step", label=name)
    axes[1].axvline(1, color="black", linestyle=":", label="equal")
    label(axes[1], "-dL/dt of two sides relative to one", "ratio of -dL/dt", "draws")
    axes[1].legend()


# --------------------------------------------------------------------------------------------------
# 7. The inner norm of DNP


def inner_norm_loss(weight: Tensor, inputs: Tensor, target: Tensor, eps: float) -> Tensor:
    """½ ‖tanh Norm(Wx) - y‖², the inner norm over the rows of W (one head)."""
    return 0.5 * (torch.tanh(rms_norm(inputs @ weight.mT, eps)) - target).square().flatten(1).sum(1)


def under_scaling(eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and gradient norms at cW for c = 0.1 ... 10, (scales, draws), and the cosine of W and its gradient."""
    normal = normal_numbers(7)
    weight, inputs, target = normal(100, 4, 6), normal(100, 12, 6), normal(100, 12, 4)

    def loss(w):
        return inner_norm_loss(w, inputs, target, eps)

    scales = torch.logspace(-1, 1, 9, dtype=torch.float64)
    values = torch.stack([loss(c * weight) for c in scales])
    slopes = torch.stack([gradients(loss, [c * weight])[0] for c in scales])
    cosine = F.cosine_similarity(weight.flatten(1), slopes[4].flatten(1), dim=1)
    return values, slopes.flatten(2).norm(dim=-1), cosine


@check("the branch does not notice the scale of W behind an inner norm", "<=")
def inner_norm_invariance():
    """Our statement: u ⊙ Norm(cWx) = u ⊙ Norm(Wx) for c > 0 (so the overall size of v does not matter either).

    Proof (eps 0): cWx has c times the rms of Wx, and Norm divides by it. With eps > 0 it holds up to eps over the
    mean square of Wx. Counter-example: eps = 1, as large as what it is added to.
    """
    changes = [relative_error(values, values[4]) for values, _, _ in (under_scaling(0.0), under_scaling(1.0))]
    return Outcome(changes[0], 1e-12, changes[1])


@check("... and its gradient is ∝ 1/‖W‖ (largest |c ‖∇L(cW)‖ / ‖∇L(W)‖ - 1|)", "<=")
def inner_norm_gradient():
    """Our statement: ∇L(cW) = ∇L(W)/c: larger weights learn more slowly, the effective rate is η/‖W‖².

    Proof: differentiate L(cW) = L(W) with respect to W: c ∇L(cW) = ∇L(W). Counter-example: eps = 1.
    """
    scales = torch.logspace(-1, 1, 9, dtype=torch.float64).unsqueeze(1)
    errors = [(scales * norms / norms[4] - 1).abs().max() for _, norms, _ in (under_scaling(0.0), under_scaling(1.0))]
    return Outcome(errors[0], 1e-11, errors[1])


@check("... and at right angles to W (largest |cosine|)", "<=")
def inner_norm_right_angle():
    """Our statement: ⟨∇L(W), W⟩ = 0, so the flow keeps ‖W‖, and every discrete step of gradient descent enlarges it.

    Proof: differentiate L(cW) = L(W) with respect to c at 1. Counter-example: eps = 1.
    """
    angles = [cosine.abs().max() for _, _, cosine in (under_scaling(0.0), under_scaling(1.0))]
    return Outcome(angles[0], 1e-12, angles[1])


@picture("An inner norm hides the size of W")
def picture_inner_norm(axes):
    """Loss and gradient norm against the scale of W."""
    scales = torch.logspace(-1, 1, 9, dtype=torch.float64)
    for eps, name in ((0.0, "eps 0"), (1.0, "eps 1: the assumption broken")):
        values, norms, _ = under_scaling(eps)
        axes[0].semilogx(scales, values[:, 0] / values[4, 0], "o-", label=name)
        axes[1].loglog(scales, norms[:, 0] / norms[4, 0], "o-", label=name)
    axes[1].loglog(scales, 1 / scales, "k--", label="1/c")
    label(axes[0], "The loss stays", "c: W is scaled by it", "loss / loss at c = 1")
    label(axes[1], "The gradient is ∝ 1/‖W‖", "c: W is scaled by it", "‖gradient‖ / ‖gradient‖ at c = 1")
    for axis in axes:
        axis.legend()


# --------------------------------------------------------------------------------------------------
# 8. One γ for all branches, or one for each (HG)


def heterogeneous_gain(pulls: Tensor) -> Tensor:
    """Σ_j [Σ_f a_fj² - (Σ_f a_fj)²], -dL/dt of separate γ less that of a shared one: (draws,).

    pulls: a_fj = ⟨w_fj, g_fj⟩, (branches, draws, columns).
    """
    return (pulls.square().sum(0) - pulls.sum(0).square()).sum(-1)


def branch_draws(agreement: float, branches: int = 2) -> tuple[Tensor, Tensor]:
    """W_f and G_f, (branches, draws, rows, columns) each.

    agreement: 1 turns G so that all pulls are negative, -1 so that they alternate; 0 leaves them as drawn.
    """
    normal = normal_numbers(8)
    weights, slopes = normal(branches, 500, 4, 6), normal(branches, 500, 4, 6)
    if agreement:
        wanted = -torch.tensor([agreement**f for f in range(branches)], dtype=torch.float64).view(-1, 1, 1, 1)
        slopes = slopes * (weights * slopes).sum(-2, keepdim=True).sign() * wanted
    return weights, slopes


def branch_rates(weights: Tensor, slopes: Tensor, update=identity) -> tuple[Tensor, Tensor]:
    """-dL/dt at γ = 1 with one γ for all branches and with one for each, of the loss Σ_f ⟨G_f, W̃_f⟩: (draws,) each."""
    gamma = ones(weights.shape[1], weights.shape[3])
    count = len(weights)

    def loss(gammas, matrices):
        return sum(matrix_dot(slope, scaled(w, g)) for slope, w, g in zip(slopes, matrices, gammas))

    shared = descent_rate(lambda g, *w: loss([g] * count, w), [gamma, *weights], update)
    separate = descent_rate(lambda *p: loss(p[:count], p[count:]), [gamma] * count + [*weights], update)
    return shared, separate


@check("shared γ: its pull is the sum of the branches' pulls ⟨w_fj, g_fj⟩", "<=")
def heterogeneous_shared_pull():
    """Our statement: shared, dγ_j/dt = -Σ_f a_fj with a_fj = ⟨w_fj, g_fj⟩; separate, dγ_fj/dt = -a_fj. So a shared γ
    is `dynamics_preconditioner` for the stacked matrix, and separate ones give each branch its own P_f.

    Proof: 1. L reads γ_j through every w̃_fj = γ_j w_fj. 2. The chain rule adds up ⟨∂L/∂w̃_fj, w_fj⟩. 3. With γ_f, one
    term each. Counter-example: the mean of the pulls, as if a shared γ moved by an average.
    """
    weights, slopes = branch_draws(0, branches=3)
    gamma = ones(500, 6)
    (to_gamma,) = gradients(lambda g: matrix_dot(slopes, scaled(weights, g)).sum(0), [gamma])
    pulls = (weights * slopes).sum(-2)
    return Outcome(relative_error(pulls.sum(0), to_gamma), 1e-12, relative_error(pulls.mean(0), to_gamma))


@check("separate γ gain Σ_f a_f² - (Σ_f a_f)² in -dL/dt over a shared one", "<=")
def heterogeneous_difference():
    """Our statement: from equal γ, -dL/dt of separate γ less that of a shared one is Σ_j [Σ_f a_fj² - (Σ_f a_fj)²].

    Proof: 1. The gradients of the W_f are the same. 2. Separate γ add Σ_f a_f². 3. A shared one adds (Σ_f a_f)².
    So separate is faster exactly if Σ_{f≠h} a_f a_h < 0. Counter-example: the formula with its sign turned.
    """
    weights, slopes = branch_draws(0, branches=3)
    shared, separate = branch_rates(weights, slopes)
    gain = heterogeneous_gain((weights * slopes).sum(-2))
    return Outcome(relative_error(gain, separate - shared), 1e-12, relative_error(-gain, separate - shared))


@check("branches that pull in different directions: separate γ faster", ">=")
def heterogeneous_faster():
    """Our statement: two branches with a_1j a_2j ≤ 0 for every j: separate γ descend at least as fast, at that instant.

    Proof: the gain of `heterogeneous_difference` is -2 Σ_j a_1j a_2j. Measured: smallest ratio of -dL/dt.
    Counter-example: branches that agree.
    """
    (opposed, apart), (agreeing, alone) = (branch_rates(*branch_draws(sign)) for sign in (-1, 1))
    return Outcome((apart / opposed).min(), 1.0, (alone / agreeing).min())


@check("branches that agree: separate γ SLOWER, the shared one moves further", "<=")
def heterogeneous_slower():
    """A negative result, ours: with a_1j a_2j ≥ 0 for every j, separate γ descend at most as fast, at that instant.

    Proof: as before; the shared γ collects both pulls, and a pull of 2a descends by 4a², two of a by 2a².
    Measured: largest ratio of -dL/dt. Counter-example: branches that pull in different directions.
    """
    (agreeing, alone), (opposed, apart) = (branch_rates(*branch_draws(sign)) for sign in (1, -1))
    return Outcome((alone / agreeing).max(), 1.0, (apart / opposed).max())


@functools.cache
def branch_curves(stiff_factor: float, soft_factor: float) -> tuple[Tensor, Tensor]:
    """Losses (states, draws) with a shared γ and with separate ones, two branches that read one norm.

    The stiff branch (curvature 10) and the soft one (curvature 1) each want their first weights times a factor.
    """
    normal = normal_numbers(8)
    stiff, soft = 0.4 * normal(50, 4, 4), 0.4 * normal(50, 4, 4)
    first_target, second_target = stiff_factor * stiff, soft_factor * soft

    def loss(first, second, a, b):
        first, second = scaled(a, first) - first_target, scaled(b, second) - second_target
        return 5 * matrix_dot(first, first) + 0.5 * matrix_dot(second, second)

    def shared_loss(gamma, a, b):
        return loss(gamma, gamma, a, b)

    gamma = ones(50, 4)
    shared = losses(shared_loss, flow(shared_loss, [gamma, stiff, soft], 0.02, 250))
    return shared, losses(loss, flow(loss, [gamma, gamma, stiff, soft], 0.02, 250))


def separate_over_shared(stiff_factor: float, soft_factor: float) -> Tensor:
    """Largest ratio of the two losses along the curves, while the shared one is above 1e-4 of its start."""
    shared, separate = branch_curves(stiff_factor, soft_factor)
    return torch.where(shared[1:] > 1e-4 * shared[0], separate[1:] / shared[1:], 0.0).max()


@check("branches of different curvature: separate γ ahead along the whole curve", "<=")
def heterogeneous_curve():
    """A task in which separate γ win all the way (measured over 50 draws, not proven beyond the first instant).

    A stiff branch wants half its weights and pulls γ down; a soft one wants twice its own. One γ serves the stiff
    branch first and is then too small for the soft one. Counter-example: both want to grow, the shared γ wins.
    """
    return Outcome(separate_over_shared(0.5, 2.0), 1.0, separate_over_shared(2.0, 2.0))


@picture("One γ for two branches, or one for each", panels=3)
def picture_heterogeneous(axes):
    """Gain at an instant against agreement; curves of the task, and of its counter-example."""
    weights, slopes = branch_draws(0)
    shared, separate = branch_rates(weights, slopes)
    products = (weights * slopes).sum(-2).prod(0).sum(-1)
    axes[0].scatter(products, separate - shared, s=6)
    axes[0].axhline(0, color="black", linewidth=0.8)
    axes[0].axvline(0, color="black", linewidth=0.8)
    label(axes[0], "At an instant: gain of separate γ", "Σ_j a_1j a_2j (> 0: branches agree)", "difference of -dL/dt")
    names = {(0.5, 2.0): "stiff shrinks, soft grows", (2.0, 2.0): "both grow (counter-example)"}
    for axis, (factors, task) in zip(axes[1:], names.items()):
        for values, name in zip(branch_curves(*factors), ("one shared γ", "a γ each")):
            axis.semilogy(0.02 * torch.arange(len(values)), values.mean(1) / values[0].mean(), label=name)
        label(axis, f"Whole curve: {task}", "time of the flow", "mean loss / loss at start", ylim=(1e-5, 1.5))
        axis.legend()


# --------------------------------------------------------------------------------------------------
# 9. Magnitude and direction apart (OR, ER)


def measured_spectrum(kind: str, alpha: Tensor, magnitude: Tensor) -> Tensor:
    """Eigenvalues, rising, of J Jᵀ, J = ∂γ/∂(parameters) of norms.ScaleVector by autodiff: (draws, d)."""
    vector = ScaleVector(tuple(alpha.shape[1:]), kind).double()
    parameters = {"alpha": alpha, "magnitude": magnitude} if kind in ("or", "er") else {"gamma": alpha}
    parts = vmap(jacrev(lambda values: functional_call(vector, values, ())))(parameters)
    jacobian = torch.cat(list(parts.values()), dim=-1)  # (draws, d, d + 1)
    return torch.linalg.eigvalsh(jacobian @ jacobian.mT)


def predicted_spectrum(kind: str, alpha: Tensor, magnitude: Tensor) -> Tensor:
    """One eigenvalue d (ER: e^2b d) along α, and m² d/‖α‖² in the d - 1 directions beside it, m = β or e^b; rising."""
    draws, d = alpha.shape
    size = magnitude if kind == "or" else magnitude.exp()
    along = d * (torch.ones_like(size) if kind == "or" else size.square())
    beside = size.square() * d / alpha.square().sum(-1, keepdim=True)
    return torch.cat((along, beside.expand(draws, d - 1)), dim=-1).sort(dim=-1).values


@check("OR and ER at init: J Jᵀ has d once and 1 elsewhere", "<=")
def reparameterized_at_init():
    """Our statement: at α = 1, β = 1 (b = 0), J Jᵀ = d û ûᵀ + (I - û ûᵀ), û = α/‖α‖: magnitude d times faster.

    Proof: 1. ∂γ/∂β = √d û. 2. ∂γ/∂α = β √d/‖α‖ (I - û ûᵀ), and ‖α‖ = √d. 3. J Jᵀ adds the two. ER: ∂γ/∂b = γ = √d û.
    Counter-example: plain γ, whose Jacobian is the identity.
    """
    alpha, expected = ones(1, 16), torch.cat((ones(15), 16 * ones(1)))
    at_init = [measured_spectrum("or", alpha, ones(1, 1)), measured_spectrum("er", alpha, 0 * ones(1, 1))]
    plain = measured_spectrum("plain", alpha, ones(1, 1))
    return Outcome(max(relative_error(values, expected) for values in at_init), 1e-12, relative_error(plain, expected))


@check("... away from init: (β √d/‖α‖)² beside α; d along it (ER: e^2b d)", "<=")
def reparameterized_away_from_init():
    """Our statement: OR has d along û at every α, β, and (β √d/‖α‖)² beside it; ER e^2b d and e^2b d/‖α‖².

    Proof: as before, with ‖α‖ and β kept. So a growing β or a shrinking ‖α‖ speeds the direction up, and in OR never
    the magnitude. Measured: 100 random α, β, b, both kinds. Counter-example: the spectrum of the init, there.
    """
    normal = normal_numbers(9)
    alpha, magnitude = 1 + 0.3 * normal(100, 8), 1 + 0.3 * normal(100, 1)
    found = [measured_spectrum(kind, alpha, magnitude) for kind in ("or", "er")]
    predicted = [predicted_spectrum(kind, alpha, magnitude) for kind in ("or", "er")]
    at_init = predicted_spectrum("or", ones(100, 8), ones(100, 1))
    return Outcome(max(map(relative_error, found, predicted)), 1e-12, relative_error(at_init, found[0]))


@check("γ does not notice ‖α‖ (largest relative change, α times 0.1 and 10)", "<=")
def reparameterized_invariance():
    """Our statement: γ(cα, β) = γ(α, β) for c > 0. Proof: α enters as α/‖α‖ alone. So decay on α cannot shrink γ:
    only the direction matters. Counter-example: plain γ, which is its own parameter.
    """
    alpha = normal_numbers(9)(100, 8)

    def change(kind):
        vector = ScaleVector((100, 8), kind).double()
        name = "alpha" if kind == "or" else "gamma"
        values = [functional_call(vector, {name: c * alpha}, ()) for c in (1, 0.1, 10)]
        return max(relative_error(value, values[0]) for value in values[1:])

    return Outcome(change("or"), 1e-12, change("plain"))


def descend_direction(decay: float, rate: Callable[[int], float], steps: int = 100, size: float = 0.02) -> Tensor:
    """γ at every step of gradient descent on OR's (α, β), α with decay and a factor on its rate: (steps, draws, d)."""
    normal = normal_numbers(9)
    vector, target, curvature = ScaleVector((50, 8), "or").double(), 1 + 0.5 * normal(50, 8), normal(50, 8, 8)

    def loss(alpha, beta):
        error = functional_call(vector, {"alpha": alpha, "magnitude": beta}, ()) - target
        return 0.5 * (curvature @ error.unsqueeze(-1)).square().sum((1, 2)) / 8

    alpha, beta = 1 + 0.2 * normal(50, 8), ones(50, 1)
    history = []
    for step in range(steps):
        to_alpha, to_beta = gradients(loss, [alpha, beta])
        alpha = (1 - size * decay) * alpha - size * rate(step) * to_alpha
        beta = beta - size * to_beta
        history.append(functional_call(vector, {"alpha": alpha, "magnitude": beta}, ()))
    return torch.stack(history)


@check("decay on α is nothing but a growing learning rate of α", "<=")
def reparameterized_decay():
    """Our statement: gradient descent with rate η and decay λ on α gives the same γ, step by step, as without decay and
    with rate η / (c_t c_{t+1}), c_t = (1 - ηλ)^t. So decay on α would only raise its rate: it is left out.

    Proof: 1. ∇ at cα is 1/c times that at α (see `inner_norm_gradient`). 2. Let α_t = c_t α'_t. 3. Dividing
    α_{t+1} = (1 - ηλ) α_t - η ∇(α_t) by c_{t+1} gives α'_{t+1} = α'_t - η/(c_t c_{t+1}) ∇(α'_t).
    Counter-example: no decay and the rate left as it was.
    """
    decayed, shrink = descend_direction(0.5, lambda step: 1.0), 1 - 0.02 * 0.5
    faster = descend_direction(0.0, lambda step: shrink ** -(2 * step + 1))
    unchanged = descend_direction(0.0, lambda step: 1.0)
    return Outcome(relative_error(faster, decayed), 1e-11, relative_error(unchanged, decayed))


@picture("Magnitude and direction apart", panels=3)
def picture_reparameterized(axes):
    """Spectra at init and away from it; decay on α as a learning rate."""
    alpha, order = ones(1, 16), torch.arange(1, 17)
    for kind, size, style, name in (("plain", 1, "s", "plain"), ("or", 1, "o", "OR"), ("er", 0, "x", "ER")):
        axes[0].semilogy(order, measured_spectrum(kind, alpha, size * ones(1, 1))[0].flip(0), style, label=name)
    label(axes[0], "Spectrum of J Jᵀ at init, d = 16", "number of the eigenvalue", "eigenvalue: rate of its direction")
    sizes = torch.linspace(0.2, 3, 30, dtype=torch.float64).unsqueeze(1)
    for kind, values in (("or", sizes), ("er", sizes.log())):
        spectrum = measured_spectrum(kind, ones(30, 16), values)
        axes[1].loglog(sizes, spectrum[:, -1], label=f"{kind.upper()}: along γ (magnitude)")
        axes[1].loglog(sizes, spectrum[:, 0], "--", label=f"{kind.upper()}: beside γ (direction)")
    axes[1].minorticks_off()
    axes[1].set_xticks([0.2, 0.5, 1, 2], labels=[0.2, 0.5, 1, 2])
    label(axes[1], "... as the magnitude moves, ‖α‖ = √d", "magnitude, β or exp(b)", "eigenvalue of J Jᵀ")
    runs = {
        "no decay": descend_direction(0.0, lambda step: 1.0),
        "decay 0.5 on α": descend_direction(0.5, lambda step: 1.0),
        "no decay, rate η/(c_t c_{t+1})": descend_direction(0.0, lambda step: 0.99 ** -(2 * step + 1)),
    }
    for (name, values), style in zip(runs.items(), ("-", "-", "k:")):
        axes[2].plot(values[:, 0, 0], style, label=name)
    label(axes[2], "Decay on α is a faster α", "step of gradient descent", "γ_1 of one draw")
    for axis in axes:
        axis.legend()


# --------------------------------------------------------------------------------------------------
# 10. Weight decay


class FeedForwardTask:
    """W_2 tanh(W_1 (γ ⊙ Norm(x))) learning the outputs of random matrices of its own kind, 12 draws."""

    def __init__(self):
        self.normal = normal = normal_numbers(10)
        self.inputs = rms_norm(normal(12, 48, 6), 0.0)
        self.target = self.forward(ones(12, 6), 0.7 * normal(12, 10, 6), 0.5 * normal(12, 4, 10))
        self.start = [ones(12, 6), 0.3 * normal(12, 10, 6), 0.3 * normal(12, 4, 10)]

    def forward(self, gamma, first, second):
        return torch.tanh(self.inputs @ scaled(first, gamma).mT) @ second.mT

    def loss(self, *parameters):
        return 0.5 * (self.forward(*parameters) - self.target).square().sum(-1).mean(-1)

    def sharpness(self, gamma, first, second):
        """λ_max of the Hessian with respect to W_1, the matrix behind the norm: (draws,)."""
        slope = grad(lambda w: self.loss(gamma, w, second).sum())
        return largest_eigenvalue(slope, first, normal_numbers(100))


DECAYS = {"no decay": (0.0, 0.0, 0.0), "decay 0.1 on γ": (0.1, 0.0, 0.0), "decay 0.1 on W instead": (0.0, 0.1, 0.0)}


@functools.cache
def sharpness_along(decay: str) -> tuple[Tensor, Tensor]:
    """λ_max in W_1 at times 0, 2, ..., 16 of the flow, (times, draws), and the loss there. decay: a key of DECAYS."""
    task = FeedForwardTask()
    states = flow(task.loss, task.start, 0.1, 160, DECAYS[decay])[::20]
    return torch.stack([task.sharpness(*state) for state in states]), losses(task.loss, states)


@check("input γ times e < 1, W over e: sharpness in W falls to max e² or less", "<=")
def decay_sharpness_same_function():
    """Our statement: with γ <- e ⊙ γ, W <- W diag(1/e), the function stays, and λ_max(H_W) changes by at most max e_j².

    Proof: 1. H_W = (diag γ ⊗ I) H̃ (diag γ ⊗ I), H̃ the Hessian in W̃, which is unchanged. 2. So H_W <- E H_W E.
    3. λ_max(E H E) ≤ ‖E‖² λ_max(H) if λ_max(H) ≥ 0. Decay moves γ_j² - ‖w_j‖² down by 2λγ_j², that is to e < 1.
    Measured: largest λ_max after / (λ_max before · max e²), e in (0.4, 1). Counter-example: e in (1, 2.5), bound 1.
    """
    task = FeedForwardTask()
    gamma, first, second = task.start
    shrink = 0.4 + 0.6 * torch.sigmoid(task.normal(12, 6))
    scales = ones(12, 6), shrink, 1 / shrink
    before, after, raised = (task.sharpness(gamma * e, first / e.unsqueeze(1), second) for e in scales)
    return Outcome((after / before / shrink.square().amax(1)).max(), 1 + 1e-6, (raised / before).max())


@check("decay on input γ: sharpness in W stays lower along training (ratio)", "<=")
def decay_sharpness():
    """λ_max in W_1 with decay 0.1 on γ over that without, largest over draws and times after the start.

    Our reading of the paper's claim: by `decay_sharpness_same_function` decay lowers it at an equal function; that
    it does so along training, where functions differ, is measured. Its price is in the picture: a higher loss.
    Counter-example: the same decay on W_1 instead, where γ grows in W_1's place and makes W_1 sharper.
    """
    none, gamma, weight = (sharpness_along(decay)[0] for decay in DECAYS)
    return Outcome((gamma / none)[1:].max(), 1.0, (weight / none)[1:].max())


REACH = 3.0  # the output scale that the task needs


def predicted_loss(decay: Tensor | float, d: int = 6) -> Tensor | float:
    """½ d (s λ/(1 + λ))²: what decay λ on an output γ leaves of the loss, where the task needs γ = s."""
    return 0.5 * d * (REACH * decay / (1 + decay)) ** 2


@functools.cache
def loss_under_decay(norm: str, decay: float) -> Tensor:
    """Loss at time 12 of y = s Norm(W* x) learned by γ ⊙ Norm(Wx) ("output") or W (γ ⊙ Norm(x)) ("input"): (draws,).

    W starts near W*, decay is on γ alone; the input form learns y = s W* Norm(x), of the same size.
    """
    normal = normal_numbers(10)
    inputs, wanted = rms_norm(normal(10, 96, 6), 0.0), torch.linalg.qr(normal(10, 6, 6))[0]
    target = REACH * inputs @ wanted.mT

    def loss(gamma, weight):
        outputs = inputs @ scaled(weight, gamma).mT
        if norm == "output":
            outputs = scaled(rms_norm(inputs @ weight.mT, 0.0), gamma)
        return 0.5 * (outputs - target).square().sum(-1).mean(-1)

    states = flow(loss, [ones(10, 6), wanted + 0.1 * normal(10, 6, 6)], 0.04, 300, decay=[decay, 0.0])
    return loss(*states[-1])


@check("decay λ = 0.2 on an OUTPUT γ leaves the loss ½ d (s λ/(1+λ))²", ">=")
def decay_output_reach():
    """Our statement: where y* = s Norm(W* x) and only γ is decayed, gradient flow from near W* ends with γ = s/(1 + λ).

    Proof: 1. With E n_j² = 1, the loss in γ is ½ Σ_j (γ_j - s)², and decay adds λγ_j to its slope. 2. Zero at
    s/(1 + λ), loss ½ d (sλ/(1 + λ))². 3. W cannot help: for γ uniform ‖γ ⊙ n‖ is fixed, and n = n* is best.
    Measured: smallest end loss over predicted. Counter-example: an input norm on the same task: W makes up for γ.
    """
    ratios = [loss_under_decay(norm, 0.2) / predicted_loss(0.2) for norm in ("output", "input")]
    return Outcome(ratios[0].min(), 0.95, ratios[1].max())


@check("... the amount is as predicted (|measured/predicted - 1|)", "<=")
def decay_output_amount():
    """As before, for λ from 0.05 to 0.4, 10 draws of 96 tokens (E n_j² = 1 holds up to the sample).

    Counter-example: the prediction ½ d (sλ)², as if γ ended at s (1 - λ).
    """
    decays = [0.05, 0.1, 0.2, 0.4]
    found = torch.stack([loss_under_decay("output", decay) for decay in decays])
    column = torch.tensor(decays, dtype=torch.float64).unsqueeze(1)
    right, wrong = predicted_loss(column), predicted_loss(column) * (1 + column) ** 2
    return Outcome((found / right - 1).abs().max(), 0.05, (found / wrong - 1).abs().max())


@picture("Weight decay on an input γ and on an output γ", panels=3)
def picture_decay(axes):
    """Sharpness and loss with decay on γ, on W and without; the reach of an output γ."""
    time = 2 * torch.arange(9)
    for decay in DECAYS:
        sharpness, loss = sharpness_along(decay)
        axes[0].plot(time, sharpness.mean(1), "o-", label=decay)
        axes[1].semilogy(time, loss.mean(1), "o-", label=decay)
    label(axes[0], "Sharpness in W behind an input norm", "time of the flow", "λ_max of the Hessian in W (mean)")
    label(axes[1], "... and the loss of the same runs", "time of the flow", "mean loss (½ squared error)")
    decays = [0.05, 0.1, 0.2, 0.4]
    grid = torch.linspace(0.03, 0.45, 50)
    axes[2].semilogy(grid, predicted_loss(grid), "k-", label="predicted ½ d (s λ/(1+λ))²")
    for norm, style in (("output", "o"), ("input", "x")):
        found = [loss_under_decay(norm, decay).mean() for decay in decays]
        axes[2].semilogy(decays, found, style, label=f"{norm} γ decayed")
    label(axes[2], f"Task that needs scale s = {REACH:.0f}", "decay λ on γ (1 / time)", "end loss (½ squared error)")
    for axis in axes:
        axis.legend()


# --------------------------------------------------------------------------------------------------
# 11. Adam: what carries over from gradient flow to sign-like updates


@check("sign updates: at γ_j ≥ 1 still at least as fast as without γ", ">=")
def adam_sign_instant():
    """Our statement: with dθ/dt = -sign(∂L/∂θ), -dL/dt = Σ_j (|γ_j| ‖g_j‖₁ + |⟨w_j, g_j⟩|) with γ, Σ_j ‖g_j‖₁ without.

    Proof: 1. -dL/dt is the sum of |∂L/∂θ|. 2. ∂L/∂w_j = γ_j g_j, ∂L/∂γ_j = ⟨w_j, g_j⟩. 3. At |γ_j| ≥ 1 the first
    term suffices. So the statement at an instant carries over, and no gradient is reversed: ⟨g_j, dw̃_j/dt⟩ ≤ 0.
    Counter-example: γ_j in (0, ½].
    """
    normal = normal_numbers(44)
    gamma, weight = 1 + normal(1000, 6).abs(), 0.3 * normal(1000, 5, 6)
    measured = effective_descent_ratio(gamma, weight, torch.sign).min()
    return Outcome(measured, 1.0, effective_descent_ratio(0.5 / gamma, weight, torch.sign).min())


@check("sign updates: separate γ are NEVER slower than a shared one", ">=")
def adam_sign_heterogeneous():
    """Our statement: with sign updates from equal γ, separate γ descend at least as fast, whatever the pulls.

    Proof: 1. The matrices' share is the same. 2. The scales' share is Σ_f |a_f| separate and |Σ_f a_f| shared.
    3. The triangle inequality. Stronger than for gradient flow, and Adam is closer to this. Counter-example: the same
    draws (three branches) under gradient flow, where branches that agree are slower apart.
    """
    rates = (branch_rates(*branch_draws(0, branches=3), update) for update in (torch.sign, identity))
    signs, flow_itself = ((separate / shared).min() for shared, separate in rates)
    return Outcome(signs, 1 - 1e-12, flow_itself)


@check("sign updates: two sides are never slower than one", ">=")
def adam_sign_dual():
    """Our statement: at u = v = 1 sign updates on two sides gain Σ_i |⟨W_i, G_i⟩| ≥ 0 over columns alone.

    Proof: as `dual_excess`, with absolute values for squares. Counter-example: u = ½ at the same W̃.
    """
    normal = normal_numbers(6)
    weight, gradient = 0.1 * normal(500, 5, 7), normal(500, 5, 7)
    both, one, other = dual_rates(weight, gradient, update=torch.sign)
    low, _, _ = dual_rates(weight, gradient, u=0.5, update=torch.sign)
    return Outcome(torch.minimum(both / one, both / other).min(), 1.0, (low / one).min())


def reparameterized_sign_ratio(beta: float) -> Tensor:
    """-dL/dt of OR over that of plain γ, sign updates of the scale vector alone, at γ = β: smallest over draws."""
    slope, vector = normal_numbers(11)(500, 8), ScaleVector((500, 8), "or").double()

    def loss(alpha, magnitude):
        return (slope * functional_call(vector, {"alpha": alpha, "magnitude": magnitude}, ())).sum(-1)

    rate = descent_rate(loss, [ones(500, 8), beta * ones(500, 1)], torch.sign)
    return (rate / slope.abs().sum(-1)).min()


@check("sign updates: OR at init descends at least as fast as plain γ", ">=")
def adam_sign_reparameterized():
    """Our statement: at α = 1, β = 1, sign updates on (α, β) descend at least as fast as on γ.

    Proof: 1. With h = ∂L/∂γ, ∂L/∂β = Σ h and ∂L/∂α = h - mean h. 2. -dL/dt = |Σ h| + ‖h - mean h‖₁. 3. ‖h‖₁ ≤
    d |mean h| + ‖h - mean h‖₁. Counter-example: β = 0.3, where the direction learns more slowly than γ would.
    """
    return Outcome(reparameterized_sign_ratio(1.0), 1 - 1e-12, reparameterized_sign_ratio(0.3))


@check("sign updates LOSE conservation: drift at step h/2 over drift at h", ">=")
def adam_conservation_lost():
    """A negative result, ours: under sign updates γ_j² - ‖w_j‖² drifts, however small the step (ratio near 1, not ½).

    Why: d(γ_j² - ‖w_j‖²)/dt = -2 γ_j sign⟨w_j, g_j⟩ + 2 ⟨w_j, sign(γ_j g_j)⟩ does not cancel. So the guarantee of
    `conservation_definite` is gradient flow's alone. Measured: mean over draws. Counter-example: gradient flow, ½.
    """
    return Outcome((1 / drift_ratio(balance, torch.sign)).mean(), 0.9, (1 / drift_ratio(balance)).mean())


@functools.cache
def adam_curves(case: str, rate: float = 0.01):
    """`train_twice` under Adam, 300 steps."""
    return train_twice(case, lambda loss, start: adam(loss, start, rate, 300))


@check("Adam as found, rate 0.01: zero init, uncorrelated: below all along", "<=")
def adam_zero_init():
    """As found, not proven: the worst L with γ / L without over 100 draws, Adam for 300 steps. At this rate the
    statement of `descent_zero_init` carries over. Counter-example: the target that shrinks w.
    """
    measured = worst_ratio(adam_curves("zero init, uncorrelated")).max()
    return Outcome(measured, 1 + 1e-9, worst_ratio(adam_curves("target shrinks w")).max())


@check("Adam as found, rate 0.03: the same task, curves cross, share of draws", ">=")
def adam_large_rate():
    """As found, a negative result: what gradient flow guarantees, Adam at three times the rate does not give. It rings
    about the minimum, and γ times W rings harder than W. Counter-example: the rate 0.01.
    """
    large, small = (crossing_share(adam_curves("zero init, uncorrelated", rate)) for rate in (0.03, 0.01))
    return Outcome(large, 0.2, small)


@check("Adam as found, rate 0.01: target shrinks w: curves cross, share", ">=")
def adam_shrinking():
    """As found: the crossings of gradient flow are Adam's too, but late: while L without γ is above a tenth of its
    start there are none, above a thousandth most. Counter-example: zero init, uncorrelated inputs.
    """
    zero = crossing_share(adam_curves("zero init, uncorrelated"))
    return Outcome(crossing_share(adam_curves("target shrinks w")), 0.5, zero)


@picture("Adam (rate 0.01) with and without γ, as found", panels=4)
def picture_adam(axes):
    """Curves under Adam; what half the step does to the conserved quantity."""
    for axis, name in zip(axes, ["zero init, uncorrelated", "random init, correlated", "target shrinks w"]):
        curves = adam_curves(name)
        for (values, _), name_of_curve in zip(curves, ("with γ", "without γ")):
            axis.semilogy((values / values[0]).median(1).values, label=name_of_curve)
        title = f"{name}\nmedian; {crossing_share(curves):.0%} of draws cross"
        label(axis, title, "step of Adam", "loss / loss at start")
        axis.legend()
    for update, name in ((identity, "gradient flow"), (torch.sign, "sign updates")):
        axes[3].hist(1 / drift_ratio(balance, update), bins=20, range=(0.4, 1.4), label=name)
    label(axes[3], "γ² - ‖w‖² under half the step:\n½ conserved, 1 not", "drift at h/2 over drift at h", "draws")
    axes[3].legend()


# --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_thread():
    """One PyTorch thread inside, as many as before afterwards: tensors this small take longer on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_checks(checks: list[Check]) -> list[dict]:
    """The rows of the checks, with progress on stderr."""
    rows = []
    with one_thread(), tqdm(checks, file=sys.stderr, leave=False) as bar:
        for one in bar:
            bar.set_description(one.name)
            rows.append(judge(one))
    return rows


def failures(rows: list[dict]) -> list[str]:
    """Names of the checks that do not hold, or whose counter-example does."""
    return [row["name"] for row in rows if not row["holds"] or row["counter_example"]["holds"]]


def table(rows: list[dict]) -> str:
    """One line a check: name, claim, measured, bound, verdict, the counter-example's value."""
    lines = [f"{'check':34} {'claim':72} {'measured':>9} {'bound':>12}  {'verdict':8} counter-example"]
    for row in rows:
        verdict = "FAILS" if row["name"] in failures([row]) else "holds"
        counter = row["counter_example"]
        lines.append(
            f"{row['name']:34} {row['claim']:72} {row['measured']:9.3g} {row['relation']} {row['bound']:9.3g}"
            f"  {verdict:8} {counter['measured']:.3g} {'HOLDS' if counter['holds'] else 'fails, as it must'}"
        )
    return "\n".join(lines)


def write_json(rows: list[dict], path: Path) -> None:
    """Writes {"checks": rows}, to a temporary name first, so that no reader ever sees half a file."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps({"checks": rows}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def draw_pictures(folder: Path) -> None:
    """One PNG a theorem."""
    from matplotlib.figure import Figure  # here, so that the checks run without matplotlib's start-up time

    folder.mkdir(parents=True, exist_ok=True)
    with one_thread():
        for name, (title, panels, draw) in tqdm(PICTURES.items(), file=sys.stderr, leave=False, desc="pictures"):
            figure = Figure(figsize=(max(6, 4.4 * panels), 4.2), layout="constrained")
            draw(figure.subplots(1, panels, squeeze=False)[0])
            figure.suptitle(title)
            figure.savefig(folder / f"{name}.png", dpi=130)


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 1 if a check does not hold, or a counter-example does."""
    parser = argparse.ArgumentParser(description="Checks every theorem in numbers; exit 1 if one does not hold.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="also draw one picture a theorem into DIR")
    options = parser.parse_args(arguments)
    rows = run_checks(CHECKS)
    print(table(rows))
    if options.json:
        write_json(rows, options.json)
    if options.plots:
        draw_pictures(options.plots)
    failed = failures(rows)
    print(f"\n{len(rows)} checks, {len(failed)} failed{': ' + ', '.join(failed) if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
