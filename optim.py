"""Which parameter is updated how, decays how much, at what rate when?

Every module that owns parameters names their roles (`parameter_roles()`). A role decides everything:

    role          optimizer     decay
    matrix        AdamW | Muon  decay_matrix
    embedding     AdamW         decay_embedding
    head          AdamW         decay_head
    router        AdamW         decay_router
    input_scale   AdamW         decay_input_scale   if scale_decay is iwd or all
    output_scale  AdamW         decay_output_scale  if scale_decay is reverse or all
    direction     AdamW         never: α only has a direction, and its length changes nothing

    rate(step) = learning_rate · multiplier(role) · schedule(step)

AdamW (arXiv 1711.05101) is torch's; Muon stands here on one page. IWD, the default policy, decays an
Input-Norm's γ (it folds into a weight that decays too) and leaves an Output-Norm's γ alone.

Try it: `python optim.py configs/unified_2b.py` prints the table of a model without allocating it.
"""

import argparse
import json
import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

# policy: the roles of scale vectors that decay under it
POLICIES = {
    "iwd": ("input_scale",),
    "all": ("input_scale", "output_scale"),
    "none": (),
    "reverse": ("output_scale",),
}
SCALE_ROLES = ("input_scale", "output_scale")
ROLES = ("matrix", "embedding", "head", "router", *SCALE_ROLES, "direction")


@dataclass
class OptimConfig:
    """Optimizer, schedule and decay."""

    optimizer: Annotated[Literal["adamw", "muon"], "what updates the matrices; all else is on AdamW"] = "adamw"
    learning_rate: Annotated[float, "peak rate"] = 1e-3
    schedule: Annotated[Literal["cosine", "wsd", "constant"], "shape of the rate after warm-up"] = "cosine"
    warmup: Annotated[float, "share of the steps in which the rate rises from 0, at least 1 step if not 0"] = 0.01
    final_rate: Annotated[float, "cosine ends at this share of the peak"] = 0.1
    decay_share: Annotated[float, "wsd: the last share of the steps, in which the rate falls to 0"] = 0.2
    decay_shape: Annotated[Literal["linear", "1-sqrt"], "wsd: how it falls"] = "linear"
    beta1: Annotated[float, "AdamW: memory of the gradient"] = 0.9
    beta2: Annotated[float, "AdamW: memory of the squared gradient"] = 0.95
    eps: Annotated[float, "AdamW: added to the root of the squared gradient"] = 1e-8
    clip: Annotated[float, "largest norm of the whole gradient; 0: no clipping"] = 1.0
    scale_decay: Annotated[Literal[tuple(POLICIES)], "scale vectors that decay: iwd input, reverse output"] = "iwd"
    decay_matrix: Annotated[float, "weight decay of the matrices"] = 0.1
    decay_embedding: Annotated[float, "weight decay of the embedding"] = 0.1
    decay_head: Annotated[float, "weight decay of an untied head"] = 0.1
    decay_router: Annotated[float, "weight decay of routers"] = 0.1
    decay_input_scale: Annotated[float, "weight decay of input scales, where scale_decay has them decay"] = 0.1
    decay_output_scale: Annotated[float, "weight decay of output scales, where scale_decay has them decay"] = 0.1
    multiplier_matrix: Annotated[float, "rate of the matrices over learning_rate"] = 1.0
    multiplier_embedding: Annotated[float, "rate of the embedding over learning_rate"] = 1.0
    multiplier_head: Annotated[float, "rate of an untied head over learning_rate"] = 1.0
    multiplier_router: Annotated[float, "rate of routers over learning_rate"] = 1.0
    multiplier_input_scale: Annotated[float, "rate of input scales over learning_rate"] = 1.0
    multiplier_output_scale: Annotated[float, "rate of output scales over learning_rate"] = 1.0
    multiplier_direction: Annotated[float, "rate of directions α over learning_rate"] = 1.0
    muon_momentum: Annotated[float, "Muon: memory of the gradient"] = 0.95
    muon_nesterov: Annotated[bool, "Muon: look one step ahead along the momentum"] = True
    muon_steps: Annotated[int, "Muon: Newton-Schulz iterations"] = 5
    muon_scale: Annotated[
        Literal["match_adamw", "spectral"],
        "Muon: match_adamw, 0.2 sqrt(max(rows, columns)), takes AdamW's rates; spectral, sqrt(max(1, rows/columns))",
    ] = "match_adamw"

    def problems(self) -> list[tuple[str, str, object]]:
        """Faults as (field, what was expected, what was given)."""
        faults = []
        for name in vars(self):
            value = getattr(self, name)
            if name in ("warmup", "final_rate", "decay_share") and not 0 <= value <= 1:
                faults.append((name, "a share from 0 to 1", value))
            if name in ("beta1", "beta2", "muon_momentum") and not 0 <= value < 1:
                faults.append((name, "at least 0 and below 1", value))
            if name.startswith(("decay_", "multiplier_", "clip")) and not isinstance(value, str) and value < 0:
                faults.append((name, "at least 0", value))
            if name in ("learning_rate", "eps", "muon_steps") and value <= 0:
                faults.append((name, "more than 0", value))
        if self.schedule == "wsd" and self.warmup + self.decay_share > 1:
            faults.append(("decay_share", f"at most 1 - warmup = {1 - self.warmup:g}", self.decay_share))
        return faults


# ---------------------------------------------------------------------------------- schedule


def warmup_steps(config: OptimConfig, max_steps: int) -> int:
    """Steps of warm-up: the share `warmup` of all, at least 1 unless the share is 0."""
    return max(1, round(config.warmup * max_steps)) if config.warmup > 0 else 0


def schedule(step: int, config: OptimConfig, max_steps: int) -> float:
    """Share of the peak rate at `step`, 0 <= step < max_steps: a pure function, so that a resume needs no state.

    warm-up    (step + 1) / warmup_steps, so that no step has rate 0
    cosine     from 1 to final_rate at the last step
    wsd        1, then from the start of the decay, with p the share of it that is over, 1 - p or 1 - sqrt(p)
    """
    warmup = warmup_steps(config, max_steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "cosine":
        progress = (step - warmup) / max(1, max_steps - 1 - warmup)
        return config.final_rate + (1 - config.final_rate) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    decay_steps = round(config.decay_share * max_steps)
    if config.schedule == "wsd" and step >= max_steps - decay_steps:
        progress = (step - (max_steps - decay_steps)) / decay_steps
        return 1 - (progress if config.decay_shape == "linear" else math.sqrt(progress))
    return 1.0


# ------------------------------------------------------------------------------------- roles


class RoleError(ValueError):
    """A parameter that has no role, or more than one."""


def parameter_roles(model: nn.Module) -> dict[str, str]:
    """{parameter name: role}, in the order of named_parameters. Raises RoleError with the names at fault."""
    found: dict[int, list[str]] = {}
    for module in model.modules():
        for name, role in getattr(module, "parameter_roles", dict)().items():
            found.setdefault(id(module.get_parameter(name)), []).append(role)
    roles = {name: found.get(id(parameter), []) for name, parameter in model.named_parameters()}
    faults = [f"{name}: {names or 'no role'}" for name, names in roles.items() if len(names) != 1 or names[0] not in ROLES]
    if faults:
        raise RoleError("every parameter needs exactly one role of " + ", ".join(ROLES) + "; " + "; ".join(faults))
    return {name: names[0] for name, names in roles.items()}


@dataclass(frozen=True)
class Treatment:
    """What a role's parameters get."""

    optimizer: str
    multiplier: float
    decay: float


def treatment(role: str, config: OptimConfig) -> Treatment:
    """The one table: role -> optimizer, rate multiplier, weight decay."""
    optimizer = "muon" if config.optimizer == "muon" and role == "matrix" else "adamw"
    decays = role != "direction" and (role not in SCALE_ROLES or role in POLICIES[config.scale_decay])
    decay = getattr(config, f"decay_{role}") if decays else 0.0
    return Treatment(optimizer, getattr(config, f"multiplier_{role}"), decay)


def role_table(model: nn.Module, config: OptimConfig) -> dict:
    """{"parameters", "scale_parameters", "roles": {role: count, tensors, optimizer, decay}}, plain values."""
    from model import parameter_count, scale_parameter_count  # upward: only to print

    roles, parameters = parameter_roles(model), dict(model.named_parameters())
    table = {}
    for role in (role for role in ROLES if role in roles.values()):
        members = [parameters[name] for name in roles if roles[name] == role]
        chosen = treatment(role, config)
        table[role] = {
            "count": sum(member.numel() for member in members),
            "tensors": len(members),
            "optimizer": chosen.optimizer,
            "learning_rate": config.learning_rate * chosen.multiplier,
            "decay": chosen.decay,
        }
    return {"parameters": parameter_count(model), "scale_parameters": scale_parameter_count(model), "roles": table}


def format_role_table(table: dict) -> str:
    """The role table as text, a line a role."""
    rows = [f"{'role':13}{'parameters':>15}{'tensors':>9}  {'optimizer':10}{'rate':>9}{'decay':>7}"]
    for role, row in table["roles"].items():
        numbers = f"{row['count']:15,}{row['tensors']:9}  {row['optimizer']:10}{row['learning_rate']:9.2g}{row['decay']:7.2g}"
        rows.append(f"{role:13}{numbers}")
    rows.append(f"{'all':13}{table['parameters']:15,}   of them in scale vectors: {table['scale_parameters']:,}")
    return "\n".join(rows)


# -------------------------------------------------------------------------------------- Muon


def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """Nearest (semi-)orthogonal matrices, roughly: every singular value is moved to about 1.

    X <- a X + (b A + c A²) X with A = X Xᵀ, from X = M / ‖M‖_F. The polynomial a s + b s³ + c s⁵ lifts small
    singular values fast (a = 3.44 a step) and holds the others between 0.7 and 1.2; coefficients of Keller
    Jordan's Muon (kellerjordan.github.io/posts/muon). matrices: (n, rows, columns); bfloat16 on a GPU.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # so that A is the smaller of the two squares
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def muon_factor(rows: int, columns: int, rule: str) -> float:
    """Size of an update over the rate. match_adamw: its root mean square is 0.2, as AdamW's (arXiv 2502.16982)."""
    return 0.2 * math.sqrt(max(rows, columns)) if rule == "match_adamw" else math.sqrt(max(1.0, rows / columns))


class Muon(torch.optim.Optimizer):
    """Momentum, then each matrix's update is made orthogonal.

        m <- momentum m + (1 - momentum) g        update = newton_schulz(g + momentum (m - g))
        W <- (1 - rate decay) W - rate factor update

    Stacks (experts, rows, columns) are batches of matrices, and matrices of one shape run as one batch.
    """

    def __init__(self, params, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, steps=5, scale="match_adamw"):
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, steps=steps, scale=scale)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            shapes: dict[tuple, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(tuple(parameter.shape), []).append(parameter)
            for parameters in shapes.values():
                self.update_same_shape(parameters, group)

    def update_same_shape(self, parameters: list[nn.Parameter], group: dict) -> None:
        """One batch: all matrices of the group that have the same shape."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters]
        updates = momenta = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        if group["nesterov"]:
            updates = torch._foreach_lerp(gradients, momenta, group["momentum"])
        rows, columns = parameters[0].shape[-2:]
        orthogonal = newton_schulz(torch.stack(updates).view(-1, rows, columns), group["steps"])
        updates = orthogonal.view(len(parameters), *parameters[0].shape).unbind()
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-group["lr"] * muon_factor(rows, columns, group["scale"]))


# -------------------------------------------------------------------------- the two together


def adamw_is_fused(device: torch.device) -> bool:
    """Whether torch has AdamW as one kernel for this device."""
    return device.type in ("cuda", "cpu", "mps")


class Optimizers:
    """AdamW, and Muon where it is chosen, stepped as one; state by parameter name, never by index."""

    def __init__(self, model: nn.Module, config: OptimConfig, shard: bool = False):
        """`shard`: each process keeps the state of its share of the parameters (ZeRO, arXiv 1910.02054).

        By torch's ZeroRedundancyOptimizer: it leaves every matrix whole on one process, as Muon's orthogonal
        update needs it, where FSDP2 would split its rows; and the loop stays that of plain DDP.
        """
        self.config, self.shard = config, shard
        roles, parameters = parameter_roles(model), dict(model.named_parameters())
        self.names = {parameter: name for name, parameter in parameters.items()}
        groups: dict[str, list[dict]] = {"adamw": [], "muon": []}
        for role in (role for role in ROLES if role in roles.values()):
            names = [name for name in roles if roles[name] == role]
            chosen = treatment(role, config)
            groups[chosen.optimizer].append(
                {
                    "params": [parameters[name] for name in names],
                    "names": names,
                    "role": role,
                    "lr": config.learning_rate * chosen.multiplier,
                    "peak_rate": config.learning_rate * chosen.multiplier,
                    "weight_decay": chosen.decay,
                }
            )
        self.all = [self.build(name, groups[name], shard) for name in groups if groups[name]]

    def build(self, name: str, groups: list[dict], shard: bool) -> torch.optim.Optimizer:
        """One torch optimizer over the given groups."""
        config = self.config
        if name == "muon":
            kind, options = Muon, dict(momentum=config.muon_momentum, nesterov=config.muon_nesterov)
            options |= dict(steps=config.muon_steps, scale=config.muon_scale)
        else:
            fused = adamw_is_fused(groups[0]["params"][0].device)
            kind, options = torch.optim.AdamW, dict(betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)
        if shard:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(groups, kind, **options)
        return kind(groups, **options)

    def set_rate(self, share: float) -> None:
        """Every group's rate to `share` of its peak."""
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_rate"] * share

    def step(self) -> None:
        for optimizer in self.all:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, dict]:
        """{parameter name: {buffer: tensor}}. With sharding a collective call, complete on rank 0 alone."""
        states = [own_part(optimizer).state for optimizer in self.all]
        named = {self.names[parameter]: buffers for state in states for parameter, buffers in state.items()}
        return gather_shares(named) if self.shard else named

    def load_state(self, named: dict[str, dict]) -> None:
        """Sets what `state` gave; a parameter without state keeps none. A sharded optimizer takes its share."""
        for part in map(own_part, self.all):
            names = [self.names[parameter] for group in part.param_groups for parameter in group["params"]]
            state = {index: named[name] for index, name in enumerate(names) if name in named}
            first = iter(range(len(names)))
            groups = [{**group, "params": [next(first) for _ in group["params"]]} for group in part.param_groups]
            part.load_state_dict({"state": state, "param_groups": groups})


def own_part(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that holds this process's state: itself, or the one inside a ZeroRedundancyOptimizer."""
    return getattr(optimizer, "optim", optimizer)


def gather_shares(named: dict[str, dict]) -> dict[str, dict]:
    """Every process's share of the state, on rank 0 and in main memory; one share travels at a time."""
    dist = torch.distributed
    named = {name: {key: buffer.cpu() for key, buffer in buffers.items()} for name, buffers in named.items()}
    for rank in range(1, dist.get_world_size()):
        box = [named]
        if dist.get_rank() == rank:
            dist.send_object_list(box, dst=0)
        elif dist.get_rank() == 0:
            dist.recv_object_list(box, src=rank)
            named |= box[0]
    return named


def main() -> None:
    """The command line: which parameters of a config are updated how."""
    from config import load_config, notices  # upward, for the command alone
    from model import GPT

    parser = argparse.ArgumentParser(description="Print the role table of a config without allocating its model.")
    parser.add_argument("config", help="a file such as configs/unified_2b.py")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    arguments, overrides = parser.parse_known_args()
    config = load_config(arguments.config, overrides)
    notices(config)
    with torch.device("meta"):
        table = role_table(GPT(config.model, config.scale, config.moe), config.optim)
    print(json.dumps(table, indent=2) if arguments.json else format_role_table(table))


if __name__ == "__main__":
    from config import run_command
    from optim import main  # this file as the module whose classes config.py knows, not as a script

    run_command(main)
