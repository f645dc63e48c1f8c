"""Which expert gets which token?

A mixture of experts replaces the feed-forward block by E routed SwiGLU experts, of which each token passes
through k, and S shared ones, through which every token passes. x is Norm(residual stream), one token:

    s = softmax(W_r (γ_r ⊙ x))                        router, float32
    chosen = the k experts of largest s_e + b_e       b balances the load: it takes part in the choice alone
    g_e = s_e, or s_e / (sum of s over the chosen)    weights; the second with `renormalize`
    y = Σ_chosen g_e expert_e(x) + Σ_shared expert_s(x)
    expert_e(x) = W_down,e (silu(W_gate,e (γ_gate,e ⊙ x)) ⊙ W_up,e (γ_up,e ⊙ x))

No token is dropped, whatever the load. Three terms keep the load even, each off at coefficient 0:

    balance loss   E Σ_e f_e p_e                 Switch, arXiv 2101.03961, eq. 4: f_e is the share of choices that
                                                 fell on e, p_e the mean of s_e; 1 if balanced
    z-loss         mean of logsumexp(logits)²    ST-MoE, arXiv 2202.08906, eq. 5: keeps the logits small
    balance bias   b_e += rate · sign(mean load - load_e), once a step: DeepSeek-V3, arXiv 2412.19437, section 2.1.2

Two ways to compute the same. `MoE.forward` sorts the tokens by expert and multiplies each expert's rows by its
matrix in one grouped matmul; `MoE.reference` is a loop over the experts, for the tests to compare with.

Try it: `python moe.py` routes a small batch, prints who went where, and evens out the load in 200 updates.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from norms import Linear, ScaleConfig, ScaleVector, ScaleVectors, feedforward_linears, matmul_dtype, rms_norm


@dataclass
class MoEConfig:
    """The experts, and what keeps their load even."""

    n_expert: Annotated[int, "routed experts in a block"] = 8
    top_k: Annotated[int, "routed experts a token passes through"] = 2
    n_shared: Annotated[int, "shared experts, through which every token passes; 0 for none"] = 0
    d_ff: Annotated[int, "width of one expert"] = 512
    renormalize: Annotated[bool, "divide a token's top_k weights by their sum"] = True
    balance_coefficient: Annotated[float, "weight of Switch's balance loss in the training objective; 0 is off"] = 0.01
    z_coefficient: Annotated[float, "weight of the router's z-loss in the training objective; 0 is off"] = 0.001
    bias_rate: Annotated[float, "step of the balance bias, which enters the choice of experts alone; 0 is off"] = 0.001
    matmul: Annotated[
        Literal["auto", "grouped_mm", "each"],
        "auto: PyTorch's grouped_mm where it works, else a matmul for each expert",
    ] = "auto"

    def problems(self) -> list[tuple[str, str, object]]:
        """Faults as (field, what was expected, what was given)."""
        lowest = {"n_expert": 1, "top_k": 1, "n_shared": 0, "d_ff": 1}
        lowest |= dict.fromkeys(("balance_coefficient", "z_coefficient", "bias_rate"), 0)
        faults = [(name, f"{least} or more", getattr(self, name)) for name, least in lowest.items()]
        faults = [fault for fault in faults if fault[2] < lowest[fault[0]]]
        if self.top_k > self.n_expert > 0:
            faults.append(("top_k", f"at most n_expert = {self.n_expert}", self.top_k))
        return faults

    def notices(self) -> list[str]:
        """What works, but is hardly meant."""
        if self.top_k == 1 and self.renormalize:
            return ["moe.top_k=1 with moe.renormalize: the weight is always 1: no gradient from the task to the router"]
        return []


class Routing(NamedTuple):
    """What the router of one layer did; `stack` puts n_layer in front of every shape."""

    auxiliary_loss: Tensor  # () with gradient: the two losses times their coefficients, to add to the objective
    balance_loss: Tensor  # () Switch's loss without its coefficient: 1 if balanced, at most n_expert / top_k
    load: Tensor  # (n_expert,) int64: tokens of each expert
    entropy: Tensor  # () mean entropy of a token's softmax over all experts, nats

    @staticmethod
    def stack(routings: list["Routing"]) -> "Routing | None":
        """The layers' routings as one; None for a model without experts."""
        return Routing(*(torch.stack(field) for field in zip(*routings))) if routings else None


class Router(nn.Module):
    """The softmax router. Logits and softmax are float32 or wider, under autocast too.

    balance_bias: (n_expert,) float32, saved with the weights, changed by `update_balance_` alone.
    """

    def __init__(self, d_model: int, config: MoEConfig, columns: ScaleVector | None):
        super().__init__()
        self.config = config
        self.linear = Linear(d_model, config.n_expert, columns=columns, role="router")
        self.register_buffer("balance_bias", torch.zeros(config.n_expert, dtype=torch.float32))

    def logits(self, x: Tensor) -> Tensor:
        """x: (N, d_model) -> (N, n_expert)."""
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, torch.float32)
            return F.linear(x.to(dtype), self.linear.effective_weight().to(dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Routing]:
        """x: (N, d_model) -> weights (N, top_k), experts (N, top_k) int64, and the Routing. Changes no state."""
        logits = self.logits(x)
        logsumexp = logits.logsumexp(-1, keepdim=True)
        scores = (logits - logsumexp).exp()  # the softmax; its logarithm's denominator serves the z-loss too
        experts = (scores.detach() + self.balance_bias).topk(self.config.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.config.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, experts, self.routing(logits, logsumexp, scores, experts)

    def routing(self, logits: Tensor, logsumexp: Tensor, scores: Tensor, experts: Tensor) -> Routing:
        """logits, scores: (N, n_expert), logsumexp: (N, 1), experts: (N, top_k)."""
        chosen = experts.flatten()
        load = chosen.new_zeros(self.config.n_expert).scatter_add(0, chosen, torch.ones_like(chosen))
        balance = self.config.n_expert * (load.to(scores.dtype) / len(chosen) * scores.mean(0)).sum()
        auxiliary = self.config.balance_coefficient * balance + self.config.z_coefficient * logsumexp.square().mean()
        with torch.no_grad():  # -Σ s log s = logsumexp - Σ s logit
            entropy = logsumexp.mean() - (scores * logits).sum(-1).mean()
        return Routing(auxiliary, balance.detach(), load, entropy)


def grouped_mm(x: Tensor, weight: Tensor, load: Tensor) -> Tensor:
    """`each_mm` in one kernel. (torch 2.9 has it under its private name only.)"""
    function = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return function(x, weight.transpose(-2, -1), offs=load.cumsum(0).to(torch.int32))


@torch.compiler.disable  # the loads would be constants of the compiled graph, and every batch has others
def each_mm(x: Tensor, weight: Tensor, load: Tensor) -> Tensor:
    """The rows of every expert times its matrix, one matmul for each expert that has any.

    x: (M, d_in), sorted by expert; weight: (E, d_out, d_in); load: (E,), summing to M > 0. Returns (M, d_out).
    Reads the loads on the host, so a GPU waits here. The gradient of an expert without rows is 0, by `unbind`.
    """
    pairs = zip(x.split(load.tolist()), weight.unbind())
    return torch.cat([F.linear(rows, matrix) for rows, matrix in pairs if len(rows)])


@cache
def try_grouped_mm(device_type: str, dtype: torch.dtype) -> bool:
    """Whether grouped_mm runs on this device in this dtype, and gives an expert without rows a gradient of 0.

    Tried rather than looked up, since it depends on the version and the GPU: on one generation the gradient of
    an empty group was unwritten memory (pytorch/pytorch#172439).
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device_type, enabled=False):
        x = torch.ones(32, 64, device=device_type, dtype=dtype)
        weight = torch.ones(3, 64, 64, device=device_type, dtype=dtype, requires_grad=True)
        load = torch.tensor([16, 0, 16], device=device_type)
        torch.full_like(weight, torch.nan)  # the allocator hands this memory out again: unwritten then shows as NaN
        try:
            y = grouped_mm(x, weight, load)
            (gradient,) = torch.autograd.grad(y, weight, torch.ones_like(y))
        except (RuntimeError, AttributeError):
            return False
        return bool((y == 64).all() and (gradient == load.view(3, 1, 1)).all())


@torch.compiler.assume_constant_result
def grouped_mm_is_right(device_type: str, dtype: torch.dtype) -> bool:
    """`try_grouped_mm`, once for each kind of input; torch.compile takes the answer and does not look inside."""
    return try_grouped_mm(device_type, dtype)


def expert_matmul(choice: str, x: Tensor, d_ff: int) -> Callable:
    """`grouped_mm` or `each_mm`, for x (M, d_model) in the dtype of the matmul. auto: grouped_mm where it works."""
    if choice == "auto":
        aligned = all(width * x.element_size() % 16 == 0 for width in (x.shape[-1], d_ff))  # as its rows must be
        compiles = x.dtype == torch.bfloat16 or not torch.compiler.is_compiling()  # it knows no other dtype
        works = aligned and compiles and grouped_mm_is_right(x.device.type, x.dtype)
        choice = "grouped_mm" if works else "each"
    return grouped_mm if choice == "grouped_mm" else each_mm


class Experts(nn.Module):
    """The matrices of n SwiGLU experts, stacked, and their scale vectors, which belong to the MoE.

    gate, up: weight (n, d_ff, d_model); down: weight (n, d_model, d_ff).
    """

    def __init__(self, n: int, d_model: int, d_ff: int, eps: float, scales: ScaleVectors, inputs: dict, prefix=""):
        super().__init__()
        self.eps, self.dual_norm = eps, scales.config.feedforward_placement == "dual_norm"
        self.gate, self.up, self.down = feedforward_linears(scales, inputs, d_model, d_ff, (n,), prefix)
        u_gate = scales[f"u_{prefix}gate"] if self.dual_norm and scales.config.kind != "none" else None
        self.borrowed = (u_gate,)  # in a tuple, as in Linear: registered at its owner alone

    def forward(self, x: Tensor, multiply: Callable, spread: Callable) -> Tensor:
        """One SwiGLU for every way to tell which rows meet which expert; (..., d_model) -> (..., d_model).

        multiply(rows, stacked weight): each row times the matrix of its expert.
        spread(u): u (n, d_ff) -> the vector of each row's expert, to multiply the rows by.
        """
        weight = torch.cat((self.gate.effective_weight(), self.up.effective_weight()), dim=-2)
        gate, up = multiply(x, weight.to(x.dtype)).chunk(2, dim=-1)
        if self.dual_norm:
            gate, up = rms_norm(gate, self.eps), rms_norm(up, self.eps)
        if self.borrowed[0] is not None:
            gate = gate * spread(self.borrowed[0]().to(x.dtype))
        return multiply((F.silu(gate) * up).to(x.dtype), self.down.effective_weight().to(x.dtype))


class MoE(nn.Module):
    """A mixture of experts over an already normalized input. Forward changes no state.

    Under heterogeneity the router, every expert's gate and every expert's up have their own γ; otherwise all
    share one. Dual placements scale the output side of every expert's gate and up; the router has none.
    """

    def __init__(self, d_model: int, norm_eps: float, moe: MoEConfig, scale: ScaleConfig):
        super().__init__()
        self.config, self.scales = moe, ScaleVectors(scale)
        routed, shared = (moe.n_expert,), (moe.n_shared,)
        branches = {"router": (), "gate": routed, "up": routed}
        if moe.n_shared:
            branches |= {"shared_gate": shared, "shared_up": shared}
        gamma = self.scales.add_inputs(d_model, branches)
        common = (d_model, moe.d_ff, norm_eps, self.scales, gamma)
        self.router = Router(d_model, moe, gamma["router"])
        self.experts = Experts(moe.n_expert, *common)
        self.shared = Experts(moe.n_shared, *common, prefix="shared_") if moe.n_shared else None

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """x: (B, T, d_model), normalized -> the same shape, and what the router did."""
        tokens = x.flatten(0, -2)  # (N, d_model)
        weights, experts, routing = self.router(tokens)
        tokens = tokens.to(matmul_dtype(tokens))  # autocast does not know grouped_mm, and this way the gather is smaller
        y = self.routed(tokens, weights, experts, routing.load)
        return self.add_shared(y, tokens).view_as(x), routing

    def routed(self, x: Tensor, weights: Tensor, experts: Tensor, load: Tensor) -> Tensor:
        """The routed experts' sum. x: (N, d_model); weights, experts: (N, top_k); load: (n_expert,)."""
        order = experts.flatten().argsort(stable=True)  # (N top_k,) choices, those of expert 0 first
        token = order // self.config.top_k  # whose choice it is
        matmul = expert_matmul(self.config.matmul, x, self.config.d_ff)

        def spread(u: Tensor) -> Tensor:
            """A matmul with one-hot rows: its backward sums in float32, where that of indexing adds row after row."""
            return F.one_hot(experts.flatten()[order], self.config.n_expert).to(u.dtype) @ u

        rows = self.experts(x.index_select(0, token), lambda rows, weight: matmul(rows, weight, load), spread)
        rows = rows * weights.flatten().index_select(0, order).unsqueeze(-1).to(rows.dtype)
        return torch.zeros_like(x).index_add(0, token, rows)

    def add_shared(self, y: Tensor, x: Tensor) -> Tensor:
        """y plus what each shared expert makes of x, both (N, d_model).

        One after the other: there are few, and of one batched matmul instead torch.compile (2.13, CPU) makes wrong
        gradients under dual_norm.
        """
        for s in range(self.config.n_shared):
            y = y + self.shared(x, lambda rows, weight: F.linear(rows, weight[s]), lambda u: u[s])
        return y

    def reference(self, x: Tensor) -> tuple[Tensor, Routing]:
        """What `forward` computes, as a plain loop over the experts."""
        tokens = x.flatten(0, -2)
        weights, experts, routing = self.router(tokens)
        tokens = tokens.to(matmul_dtype(tokens))
        y = torch.zeros_like(tokens)
        for e in range(self.config.n_expert):
            token, choice = (experts == e).nonzero(as_tuple=True)
            rows = self.experts(tokens[token], lambda rows, weight: rows @ weight[e].T, lambda u: u[e])
            y = y.index_add(0, token, rows * weights[token, choice].unsqueeze(-1).to(rows.dtype))
        return self.add_shared(y, tokens).view_as(x), routing

    def idle_parameters(self) -> int:
        """Parameters of routed experts that one token does not pass through: n_expert - top_k experts' worth."""
        vectors = [v for name, v in self.scales.items() if len(v.shape) == 2 and "shared" not in name]  # per expert
        owned = [p for module in (self.experts, *vectors) for p in module.parameters()]
        return sum(p.numel() // self.config.n_expert for p in owned) * (self.config.n_expert - self.config.top_k)


@torch.no_grad()
def update_balance_(model: nn.Module, load: Tensor) -> None:
    """bias += bias_rate · sign(mean load - load) in every layer (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Call it once a step. load: (n_layer, n_expert), tokens of the whole global batch: `Routing.load` summed over
    micro-batches and processes. Raises ValueError if it does not have a row for each layer with experts.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if len(load) != len(routers):
        raise ValueError(f"loads of {len(load)} layers given, the model has {len(routers)} layers with experts")
    for router, tokens in zip(routers, load.to(routers[0].balance_bias.device) if routers else ()):
        missing = tokens.sum() - router.config.n_expert * tokens  # mean - load, times n_expert: exact in integers
        router.balance_bias += router.config.bias_rate * missing.sign().to(router.balance_bias.dtype)


def load_statistics(load: Tensor) -> tuple[float, float]:
    """(expert_load_max, expert_load_min): tokens over the fair share, 1 if balanced, each in its worst layer.

    load: (n_layer, n_expert) tokens.
    """
    load = load.double()
    share = load / load.mean(-1, keepdim=True)
    return share.max().item(), share.min().item()


def main() -> None:
    """The demonstration: routes tokens, then lets the bias even out the load."""
    from model import GPT, ModelConfig  # upward, for the demonstration alone
    from moe import MoEConfig, load_statistics, update_balance_  # the classes that model.py knows

    config = MoEConfig(n_expert=6, top_k=2, d_ff=16)
    shape = ModelConfig(n_layer=1, n_head=2, d_model=32, vocab_size=61, block_size=16)
    moe = GPT(shape, moe=config).blocks[0].feedforward
    generator = torch.Generator().manual_seed(0)
    # Tokens have a direction in common, as in a trained network, so that some experts are everybody's favourites
    x = torch.randn(4, 256, 32, generator=generator) + torch.randn(32, generator=generator)
    x = rms_norm(x, 1e-6)

    with torch.no_grad():
        weights, experts, routing = moe.router(x.flatten(0, 1))
    print("token  experts, with their weights")
    for token in range(6):
        pairs = ", ".join(f"{e} ({w:.2f})" for e, w in zip(experts[token].tolist(), weights[token].tolist()))
        print(f"{token:5}  {pairs}")
    tokens, routed = x.shape[0] * x.shape[1], routing.load.sum().item()
    print(f"\n{tokens} tokens x {config.top_k} choices, {routed} routed, {tokens * config.top_k - routed} dropped")
    print(f"balance loss {routing.balance_loss:.3f}, entropy {routing.entropy:.3f} nats\n")
    print("updates  busiest  idlest  tokens of each expert (busiest, idlest: over the fair share)")
    for step in range(201):
        with torch.no_grad():
            load = moe.router(x.flatten(0, 1))[2].load
        if step in (0, 25, 50, 100, 200):
            most, least = load_statistics(load[None])
            print(f"{step:7}  {most:7.2f}  {least:6.2f}  {load.tolist()}")
        update_balance_(moe, load[None])


if __name__ == "__main__":
    main()
