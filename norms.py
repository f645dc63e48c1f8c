"""What is a scale vector, and where does it sit?

    y = γ ⊙ x / rms(x),   rms(x) = sqrt(mean(x²) + eps)

γ is the scale vector. Three questions describe every variant in this repository, and
`ScaleConfig` answers them:

    what is one?         plain    γ
    (kind)               centred  γ = 1 + δ
                         or       γ = β √d α/‖α‖        direction α apart from magnitude β
                         er       γ = exp(b) √d α/‖α‖   the same, magnitude always positive
                         none     no scale vector at all
    one for how many?    heterogeneous: each linear map f that reads the norm has its own γ_f
    on which sides?      input      W_f (v_f ⊙ Norm(x))
    (placement)          dual       u_f ⊙ W_f (v_f ⊙ Norm(x))
                         dual_norm  u_f ⊙ Norm(W_f (v_f ⊙ Norm(x)))

Scale the weight, not the activations: u ⊙ W (v ⊙ x) = (u vᵀ ⊙ W) x. A scale vector next to a
linear map multiplies the *weight*: d_out·d_in multiplications a forward pass, however many
tokens there are, and the linear maps behind one norm still share one matmul. Folding is the same line:
weight <- effective weight, scale <- 1. So a vector that folds (role `input_scale`) is one that
some `Linear` takes into its weight; one that no linear map can take (role `output_scale`)
multiplies activations.

Try it: `python norms.py` prints every scale vector of a tiny model, its role, what it folds
into, and how little the logits move when it does.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# strategy: (kind, heterogeneous, placement in attention and in the feed-forward)
STRATEGIES = {
    "none": ("none", False, "input"),
    "plain": ("plain", False, "input"),
    "hg": ("plain", True, "input"),
    "dp": ("plain", False, "dual"),
    "dnp": ("plain", False, "dual_norm"),
    "or": ("or", False, "input"),
    "er": ("er", False, "input"),
    "hg_dnp": ("plain", True, "dual_norm"),
    "unified": ("or", True, "dual_norm"),
}
Kind = Literal["none", "plain", "centred", "or", "er"]
Placement = Literal["input", "dual", "dual_norm"]


@dataclass
class ScaleConfig:
    """Which scale vectors the model has. Fields that are None follow from `strategy`."""

    strategy: Annotated[Literal[tuple(STRATEGIES)], "a named choice for the fields below"] = "plain"
    kind: Annotated[Kind | None, "what every scale vector of the model is made of"] = None
    heterogeneous: Annotated[bool | None, "one vector for each linear map instead of one for each norm"] = None
    attention_placement: Annotated[Placement | None, "sides of q, k, v that are scaled"] = None
    feedforward_placement: Annotated[Placement | None, "sides of gate and up that are scaled"] = None
    inner_role: Annotated[
        Literal["fold", "output"],
        "our reading: u behind the inner norm on v and up decays because it folds; output: treat it as an Output-Norm",
    ] = "fold"

    def resolved(self) -> "ScaleConfig":
        """A copy in which the strategy has filled every field that was None."""
        kind, heterogeneous, placement = STRATEGIES[self.strategy]
        defaults = {
            "kind": kind,
            "heterogeneous": heterogeneous,
            "attention_placement": placement,
            "feedforward_placement": placement,
        }
        return replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})


def rms_norm(x: Tensor, eps: float, scale: Tensor | None = None) -> Tensor:
    """scale ⊙ x / sqrt(mean(x²) + eps) over the last dimension; statistics in float32 or wider.

    x: (..., d); scale: (d,) or None. Returns (..., d) in x's dtype.
    """
    return F.rms_norm(x, x.shape[-1:], None if scale is None else scale.to(x.dtype), eps)


class ScaleVector(nn.Module):
    """One scale vector γ, exactly 1 at the start. Calling it returns γ.

    shape: (d,), or (n, d) for a stack of n experts, whose vectors are independent.
    folds_into: the linear map and side that can take it, in words; None if nothing can.
    role: "input_scale" if it folds, "output_scale" if not. It decides decay and export.
    """

    def __init__(self, shape: tuple[int, ...], kind: Kind, folds_into: str | None = None, role: str | None = None):
        super().__init__()
        self.shape, self.kind, self.folds_into = shape, kind, folds_into
        self.role = role or ("input_scale" if folds_into else "output_scale")
        if kind in ("or", "er"):
            self.alpha = nn.Parameter(torch.empty(shape))
            self.magnitude = nn.Parameter(torch.empty(*shape[:-1], 1))  # β, or b of ER
        else:
            self.gamma = nn.Parameter(torch.empty(shape))  # δ of the centred kind
        self.reset_()

    def forward(self) -> Tensor:
        """γ, shape `self.shape`. The mean square, unlike ‖α‖/√d, is exactly 1 at α = 1, so γ is too."""
        if self.kind == "plain":
            return self.gamma
        if self.kind == "centred":
            return 1 + self.gamma
        magnitude = self.magnitude if self.kind == "or" else self.magnitude.exp()
        return self.alpha * (magnitude * self.alpha.square().mean(-1, keepdim=True).rsqrt())

    @torch.no_grad()
    def reset_(self) -> None:
        """Back to γ = 1."""
        for name, parameter in self.named_parameters():
            zero_is_one = (name, self.kind) in (("gamma", "centred"), ("magnitude", "er"))
            parameter.fill_(0.0 if zero_is_one else 1.0)

    def parameter_roles(self) -> dict[str, str]:
        """α only has a direction, so it is never decayed; the other parameters follow the vector's role."""
        return {name: "direction" if name == "alpha" else self.role for name, _ in self.named_parameters()}

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, kind={self.kind}, role={self.role}, folds_into={self.folds_into}"


class ScaleVectors(nn.ModuleDict):
    """The scale vectors of one sublayer, by the names of the paper: gamma, gamma_q, u_q, ..."""

    def __init__(self, config: ScaleConfig):
        super().__init__()
        self.config = config

    def add(self, name: str, shape: tuple[int, ...], folds_into: str | None = None, inner=False) -> ScaleVector | None:
        """Makes one vector; None when the kind is none. `inner`: it stands behind an inner norm."""
        if self.config.kind == "none":
            return None
        role = "output_scale" if inner and self.config.inner_role == "output" else None
        self[name] = ScaleVector(shape, self.config.kind, folds_into, role)
        return self[name]

    def value(self, name: str) -> Tensor | None:
        """γ of the vector called `name`; None if there is no such vector."""
        return self[name]() if name in self else None

    def add_inputs(self, d_model: int, stacks: dict[str, tuple[int, ...]]) -> dict[str, ScaleVector | None]:
        """The input side of every linear map behind one norm: {branch: its γ}.

        stacks: {branch: leading shape}, () for one matrix and (n,) for a stack of n experts. Without
        heterogeneity all branches hold the same vector.
        """
        if self.config.heterogeneous:
            return {
                branch: self.add(f"gamma_{branch}", (*stack, d_model), f"columns of {branch}")
                for branch, stack in stacks.items()
            }
        shared = self.add("gamma", (d_model,), "columns of " + ", ".join(stacks))
        return dict.fromkeys(stacks, shared)


class Linear(nn.Module):
    """y = (u vᵀ ⊙ W) x: a linear map that carries its scale vectors in its weight.

    weight: (d_out, d_in), or (n, d_out, d_in) for a stack of n experts.
    columns, rows: the vectors v (d_in,) and u (d_out,), with the same stack; their owner is the sublayer,
    because several linear maps may share one.
    spread: maps v's values to the columns where they are fewer (a value head read by several query heads).
    role: of the weight; None where another module owns it (a tied head).
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        stack: tuple[int, ...] = (),
        columns: ScaleVector | None = None,
        rows: ScaleVector | None = None,
        spread: Callable[[Tensor], Tensor] | None = None,
        role: str | None = "matrix",
    ):
        super().__init__()
        self.d_in, self.d_out, self.role, self.spread = d_in, d_out, role, spread
        self.weight = nn.Parameter(torch.empty(*stack, d_out, d_in))
        self.borrowed = (columns, rows)  # in a tuple, so that PyTorch registers the vectors at their owner alone

    def effective_weight(self, role: str | None = None) -> Tensor:
        """u vᵀ ⊙ W, the shape of W. With a role, only the vectors of that role are multiplied in."""
        columns, rows = (scale if scale and role in (None, scale.role) else None for scale in self.borrowed)
        weight = self.weight
        if columns is not None:
            v = columns() if self.spread is None else self.spread(columns())
            weight = weight * v.unsqueeze(-2)
        if rows is not None:
            weight = weight * rows().unsqueeze(-1)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)"""
        return fused_linear(x, [self])[0]

    def parameter_roles(self) -> dict[str, str]:
        return {"weight": self.role} if self.role else {}


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matmul with x: autocast's where it is on, else that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def fused_linear(x: Tensor, linears: list[Linear]) -> list[Tensor]:
    """All linear maps that read x as one matmul: (..., d_in) -> [(..., d_out) of each]."""
    dtype = matmul_dtype(x)  # each weight is scaled in its own dtype and cast once, before they are joined
    weights = [linear.effective_weight().to(dtype) for linear in linears]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    return list(F.linear(x.to(dtype), weight).split([linear.d_out for linear in linears], dim=-1))


def repeat_heads(head_dim: int, repeats: int) -> Callable[[Tensor], Tensor]:
    """Spreads u of v, (n_kv_head * head_dim,), over the columns of W_o, (n_head * head_dim,)."""
    return lambda u: u.view(-1, 1, head_dim).expand(-1, repeats, head_dim).flatten()


def feedforward_linears(
    scales: ScaleVectors,
    inputs: dict[str, ScaleVector | None],
    d_model: int,
    d_ff: int,
    stack: tuple[int, ...] = (),
    prefix: str = "",
) -> tuple[Linear, Linear, Linear]:
    """gate, up and down of a SwiGLU with their scale vectors.

    dual: u folds into the rows of its own matrix. dual_norm: u on up passes through the product with
    silu(gate) into the columns of down; u on gate is stopped by the SiLU and scales activations.
    prefix: put before the branch names, as in `inputs`, to tell experts apart.
    """
    gate, up, down = prefix + "gate", prefix + "up", prefix + "down"
    placement = scales.config.feedforward_placement
    rows = {gate: None, up: None}
    u_up = None
    if placement == "dual":
        rows = {name: scales.add(f"u_{name}", (*stack, d_ff), f"rows of {name}") for name in (gate, up)}
    if placement == "dual_norm":
        scales.add(f"u_{gate}", (*stack, d_ff))
        u_up = scales.add(f"u_{up}", (*stack, d_ff), f"columns of {down}", inner=True)
    return (
        Linear(d_model, d_ff, stack, columns=inputs[gate], rows=rows[gate]),
        Linear(d_model, d_ff, stack, columns=inputs[up], rows=rows[up]),
        Linear(d_ff, d_model, stack, columns=u_up),
    )


@torch.no_grad()
def fold_(model: nn.Module) -> nn.Module:
    """Folds every input_scale into the weight beside it, in place, and leaves the function as it was.

    Afterwards every input scale is 1; output scales are untouched. A tied head is untied first, with
    a warning: its γ cannot go into a matrix that the embedding reads too.
    """
    if getattr(model, "tied", False):
        warnings.warn("fold_: the tied head gets its own matrix, because its scale cannot fold into the embedding")
        model.untie_()
    for module in model.modules():
        if isinstance(module, Linear):
            module.weight.copy_(module.effective_weight("input_scale"))
    for module in model.modules():
        if isinstance(module, ScaleVector) and module.role == "input_scale":
            module.reset_()
    return model


def main() -> None:
    """The demonstration: every scale vector with its role, and the logits before and after folding."""
    from model import GPT, ModelConfig  # upward, for the demonstration alone
    from norms import ScaleConfig, ScaleVector, fold_  # the classes that model.py knows, not this script's own

    shape = ModelConfig(n_layer=1, n_head=4, n_kv_head=2, d_model=32, vocab_size=61, block_size=16, post_norm=True)
    generator = torch.Generator().manual_seed(0)
    model = GPT(shape, ScaleConfig(strategy="unified")).double()
    for parameter in model.parameters():  # away from 1, as after training
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    idx = torch.randint(shape.vocab_size, (2, 16), generator=generator)
    before, _ = model(idx)
    print(f"{'scale vector':38} {'shape':>7}  {'role':13} folds into")
    for name, module in model.named_modules():
        if isinstance(module, ScaleVector):
            print(f"{name:38} {str(tuple(module.shape)):>7}  {module.role:13} {module.folds_into or 'nothing'}")
    change = (fold_(model)(idx)[0] - before).abs().max() / before.abs().max()
    print(f"\nafter folding every input_scale the logits (float64) moved by {change:.1e} of the largest")


if __name__ == "__main__":
    main()
