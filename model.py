"""What does the network compute?

A Llama-style transformer. x is the residual stream, Norm is RMSNorm without parameters, and every
linear map carries its scale vectors in its weight (norms.py):

    x = E[idx]                                     embedding
    x = x + W_o softmax(q kᵀ / sqrt(head_dim)) v   q, k, v read Norm(x); q and k are rotated by position
    x = x + W_down (silu(gate) ⊙ up)               gate, up read Norm(x); or a mixture of experts (moe.py)
    loss = mean over tokens of -log softmax(W_head Norm(x))[target]

Try it: `python model.py` builds every size without memory and prints its parameters and FLOPs.
"""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe import MoE, MoEConfig, Routing
from norms import (
    Linear,
    ScaleConfig,
    ScaleVector,
    ScaleVectors,
    feedforward_linears,
    fused_linear,
    matmul_dtype,
    repeat_heads,
    rms_norm,
)


@dataclass
class ModelConfig:
    """The shape of the network. Fields that are None follow from the others."""

    n_layer: Annotated[int, "number of blocks"] = 6
    n_head: Annotated[int, "query heads in a block"] = 12
    n_kv_head: Annotated[int | None, "key and value heads; fewer than n_head is grouped-query attention (default n_head)"] = None
    head_dim: Annotated[int | None, "width of one head, even (default d_model / n_head)"] = None
    d_model: Annotated[int, "width of the residual stream"] = 768
    d_ff: Annotated[int | None, "width of the feed-forward block (default int(8 d_model / 3))"] = None
    vocab_size: Annotated[int, "tokens the tokenizer knows, its end token included"] = 50257
    vocab_multiple: Annotated[int, "embedding and head are padded to a multiple of this; the logits are not"] = 64
    block_size: Annotated[int, "tokens in one training context"] = 1024
    rope_theta: Annotated[float, "base of the rotary wavelengths"] = 10000.0
    norm_eps: Annotated[float, "added to the mean square in every norm"] = 1e-6
    init_std: Annotated[float | None, "spread of the first weights (default 0.02, times sqrt(768 / d_model) below 768)"] = None
    tied: Annotated[bool, "embedding and head share one matrix"] = False
    qk_norm: Annotated[bool, "normalize queries and keys per head (a dual_norm attention does so anyway)"] = False
    post_norm: Annotated[bool, "also normalize what each sublayer adds to the stream (Gemma's sandwich)"] = False

    def resolved(self) -> "ModelConfig":
        """A copy in which every field that was None has its value."""
        defaults = {
            "n_kv_head": self.n_head,
            "head_dim": self.d_model // self.n_head,
            "d_ff": int(8 * self.d_model / 3),
            "init_std": 0.02 * max(1.0, 768 / self.d_model) ** 0.5,
        }
        return replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def problems(self) -> list[tuple[str, str, object]]:
        """Faults as (field, what was expected, what was given)."""
        positive = ("n_layer", "n_head", "n_kv_head", "head_dim", "d_model", "d_ff", "vocab_size", "vocab_multiple")
        positive += ("block_size", "rope_theta", "norm_eps", "init_std")
        given = {name: getattr(self, name) for name in positive}
        faults = [(name, "more than 0", value) for name, value in given.items() if value is not None and value <= 0]
        if faults:
            return faults  # the rest divides by them
        full = self.resolved()
        if self.head_dim is None and full.d_model % full.n_head:
            faults.append(("d_model", f"a multiple of n_head = {full.n_head}, or a head_dim", full.d_model))
        elif full.head_dim % 2:
            faults.append(("head_dim", "an even number, since rotary positions turn pairs", full.head_dim))
        if full.n_head % full.n_kv_head:
            faults.append(("n_head", f"a multiple of n_kv_head = {full.n_kv_head}", full.n_head))
        return faults


def rotary_table(length: int, head_dim: int, theta: float, device) -> tuple[Tensor, Tensor]:
    """cos and sin of position · theta^(-2i / head_dim), each (length, 1, head_dim / 2), float32."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turns each pair (x_i, x_{i + head_dim/2}) by its position's angle; x: (B, T, heads, head_dim)."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention over an already normalized input, with the scale vectors of q, k and v."""

    def __init__(self, config: ModelConfig, scale: ScaleConfig):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.eps = config.norm_eps
        self.dual_norm = scale.attention_placement == "dual_norm"
        self.qk_norm = config.qk_norm or self.dual_norm
        width = {"q": self.n_head * self.head_dim, "k": self.n_kv_head * self.head_dim, "v": self.n_kv_head * self.head_dim}

        self.scales = ScaleVectors(scale)
        gamma = self.scales.add_inputs(config.d_model, dict.fromkeys(width, ()))
        rows, u_v = dict.fromkeys(width), None
        if scale.attention_placement == "dual":
            rows = {name: self.scales.add(f"u_{name}", (width[name],), f"rows of {name}") for name in width}
        if self.qk_norm:  # rotation and a dot product follow: these two fold into nothing
            self.qk_names = ("u_q", "u_k") if self.dual_norm else ("norm_q", "norm_k")
            for name in self.qk_names:
                self.scales.add(name, (self.head_dim,))
        if self.dual_norm:  # softmax(..) (u ⊙ v) = u ⊙ (softmax(..) v), which W_o reads
            u_v = self.scales.add("u_v", (width["v"],), "columns of o", inner=True)
        self.q, self.k, self.v = (
            Linear(config.d_model, width[name], columns=gamma[name], rows=rows[name]) for name in width
        )
        spread = repeat_heads(self.head_dim, self.n_head // self.n_kv_head)
        self.o = Linear(width["q"], config.d_model, columns=u_v, spread=spread)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """x: (B, T, d_model), normalized -> (B, T, d_model)."""
        B, T, _ = x.shape
        q, k, v = (y.view(B, T, -1, self.head_dim) for y in fused_linear(x, [self.q, self.k, self.v]))
        if self.qk_norm:
            q, k = (rms_norm(y, self.eps, self.scales.value(name)) for y, name in zip((q, k), self.qk_names))
        if self.dual_norm:
            v = rms_norm(v, self.eps)
        q, k = rotate(q, table), rotate(k, table)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # (B, heads, T, head_dim)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.n_head != self.n_kv_head)
        return self.o(y.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    """SwiGLU over an already normalized input: W_down (silu(gate) ⊙ up)."""

    def __init__(self, config: ModelConfig, scale: ScaleConfig):
        super().__init__()
        self.eps, self.dual_norm = config.norm_eps, scale.feedforward_placement == "dual_norm"
        self.scales = ScaleVectors(scale)
        gamma = self.scales.add_inputs(config.d_model, {"gate": (), "up": ()})
        self.gate, self.up, self.down = feedforward_linears(self.scales, gamma, config.d_model, config.d_ff)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., d_model), normalized -> (..., d_model)."""
        gate, up = fused_linear(x, [self.gate, self.up])
        if self.dual_norm:
            gate, up = rms_norm(gate, self.eps, self.scales.value("u_gate")), rms_norm(up, self.eps)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """x + attention(Norm(x)), then x + feedforward(Norm(x)), each summand normalized again with post_norm."""

    def __init__(self, config: ModelConfig, scale: ScaleConfig, moe: MoEConfig | None):
        super().__init__()
        self.eps, self.post_norm = config.norm_eps, config.post_norm
        self.attention = Attention(config, scale)
        self.feedforward = FeedForward(config, scale) if moe is None else MoE(config.d_model, config.norm_eps, moe, scale)
        self.scales = ScaleVectors(scale)
        if config.post_norm:  # a residual add follows: these fold into nothing
            self.scales.add("post_attention", (config.d_model,))
            self.scales.add("post_feedforward", (config.d_model,))

    def post(self, y: Tensor, name: str) -> Tensor:
        """The norm after a sublayer, where the model has one."""
        return rms_norm(y, self.eps, self.scales.value(name)) if self.post_norm else y

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Routing | None]:
        """x: (B, T, d_model) -> the same, and what the router did (None in a dense block)."""
        x = x + self.post(self.attention(rms_norm(x, self.eps), table), "post_attention")
        y = self.feedforward(rms_norm(x, self.eps))
        y, routing = y if isinstance(self.feedforward, MoE) else (y, None)
        return x + self.post(y, "post_feedforward"), routing


class Embedding(nn.Module):
    """A row of d_model numbers for each token. weight: (padded_vocab_size, d_model)."""

    def __init__(self, rows: int, d_model: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, d_model))

    def forward(self, idx: Tensor) -> Tensor:
        return F.embedding(idx, self.weight)

    def parameter_roles(self) -> dict[str, str]:
        return {"weight": "embedding"}


def wide_logits(hidden: Tensor, head: Tensor) -> Tensor:
    """hidden @ head.T in float32 or wider: (N, d), (padded vocabulary, d) -> (N, padded vocabulary)."""
    logits = hidden @ head.T
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def default_loss_chunk(vocab_size: int) -> int:
    """Tokens of 2^25 logits, 134 MB in float32, rounded down to a power of two: 512 of GPT-2's vocabulary."""
    return 1 << (2**25 // vocab_size).bit_length() - 1


@torch.library.custom_op("nanoscale::add_matmul_", mutates_args=("total",))
def add_matmul_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, without a second tensor of its size where the dtypes agree; an operator of its own,
    because torch.compile turns addmm_ into a copy of `total` and an addmm. Shapes (m, n), (m, k), (k, n)."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of `hidden @ weight.T` without ever holding all the logits.

    The gradient of one chunk of logits is (softmax(logits) - onehot(target)) / N, known as soon as the logits
    are. So it is multiplied into both gradients at once, the chunk is dropped, and backward has nothing
    left to compute: the head's matmul runs once. The softmax stays undivided, exp(logits - peak): dividing the
    short rows on the other side of each matmul saves a pass over the chunk. (Second derivatives need chunking off.)
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, vocab_size, chunk):
        """hidden: (N, d), weight: (padded vocabulary, d), targets: (N,) int64 -> scalar, float32 or wider."""
        head, losses = weight.to(hidden.dtype), []
        grad_hidden, grad_weight = [], torch.zeros_like(weight)
        for h, target in zip(hidden.split(chunk), targets[:, None].split(chunk)):
            logits = wide_logits(h, head)
            logits[:, vocab_size:] = float("-inf")  # the padding: a softmax of 0 and so no gradient
            peak, wanted = logits.amax(1, keepdim=True), logits.gather(1, target)
            softmax = logits.sub_(peak).exp_()
            total = softmax.sum(1, keepdim=True)
            losses.append(total.log() + peak - wanted)
            softmax.scatter_(1, target, (wanted - peak).exp() - total)
            gradient, share = softmax.to(h.dtype), (1 / (total * len(targets))).to(h.dtype)
            grad_hidden.append((gradient @ head) * share)
            add_matmul_(grad_weight, gradient.T, h * share)
        ctx.save_for_backward(torch.cat(grad_hidden), grad_weight)
        return torch.cat(losses).mean()

    @staticmethod
    def backward(ctx, grad_loss):
        if torch.is_grad_enabled():  # create_graph=True: without this word they would silently be wrong
            raise RuntimeError("second derivatives of the loss need model.loss_chunk = 0")
        grad_hidden, grad_weight = ctx.saved_tensors
        # in place, to save a matrix of the head's size; autograd notices, and refuses a second backward
        return grad_hidden.mul_(grad_loss.to(grad_hidden.dtype)), grad_weight.mul_(grad_loss), None, None, None


class GPT(nn.Module):
    """The whole network.

    Switches, set as attributes after construction (train.py sets them from its config):
    loss_chunk: tokens whose logits exist at once; 0 computes the loss in one piece by autograd.
    activation_checkpointing: keep only each block's input and compute the rest again in backward.
    """

    def __init__(self, config: ModelConfig, scale: ScaleConfig | None = None, moe: MoEConfig | None = None):
        super().__init__()
        self.config = config = config.resolved()
        self.scale_config = scale = (scale or ScaleConfig()).resolved()
        self.moe_config = moe
        self.loss_chunk, self.activation_checkpointing = default_loss_chunk(config.padded_vocab_size), False
        self.embedding = Embedding(config.padded_vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, scale, moe) for _ in range(config.n_layer))
        self.scales = ScaleVectors(scale)
        gamma = self.scales.add_inputs(config.d_model, {"head": ()})["head"]
        self.head = Linear(config.d_model, config.padded_vocab_size, columns=gamma, role="head")
        if config.tied:
            self.head.weight, self.head.role = self.embedding.weight, None  # the embedding owns the matrix
        self.init_weights_(torch.Generator().manual_seed(0))

    @property
    def tied(self) -> bool:
        return self.head.weight is self.embedding.weight

    @torch.no_grad()
    def untie_(self) -> None:
        """Gives the head its own copy of the embedding's matrix."""
        self.head.weight, self.head.role = nn.Parameter(self.embedding.weight.clone()), "head"

    @torch.no_grad()
    def init_weights_(self, generator: torch.Generator) -> None:
        """Normal(0, init_std) for every matrix, over sqrt(2 n_layer) where it writes to the stream; γ = 1.

        Drawn on the CPU in the order of the modules, so that one seed gives all strategies and devices the
        same matrices. `generator`: a CPU generator. On the meta device there is nothing to draw.
        """
        residual = self.config.init_std / (2 * self.config.n_layer) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, ScaleVector):
                module.reset_()
            elif isinstance(module, (Linear, Embedding)) and not module.weight.is_meta and not (module is self.head and self.tied):
                std = residual if name.endswith((".o", ".down")) else self.config.init_std
                module.weight.copy_(torch.empty(module.weight.shape).normal_(0, std, generator=generator))

    def hidden(self, idx: Tensor) -> tuple[Tensor, list[Routing]]:
        """Norm of the last residual stream, (B, T, d_model), and what each router did."""
        table = rotary_table(idx.shape[1], self.config.head_dim, self.config.rope_theta, idx.device)
        x, routings = self.embedding(idx), []
        for block in self.blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x, routing = checkpoint(block, x, table, use_reentrant=False)
            else:
                x, routing = block(x, table)
            routings.append(routing)
        return rms_norm(x, self.config.norm_eps), [routing for routing in routings if routing is not None]

    def forward(self, idx: Tensor, targets: Tensor | None = None, with_routing: bool = False):
        """idx: (B, T) int64 token ids; targets: the same shape, the next token of each.

        Without targets: (logits (B, T, vocab_size), None). With: (None, mean loss in nats a token), which has
        no balancing term in it. `with_routing` adds a third value, the `Routing` of all layers.
        """
        if idx.shape[1] > self.config.block_size:
            raise ValueError(f"{idx.shape[1]} tokens given, block_size is {self.config.block_size}")
        x, routings = self.hidden(idx)
        if targets is None:
            output = self.head(x)[..., : self.config.vocab_size], None
        else:
            output = None, self.loss(x.flatten(0, 1), targets.flatten())
        return (*output, Routing.stack(routings)) if with_routing else output

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token; hidden: (N, d_model), targets: (N,) int64."""
        hidden = hidden.to(matmul_dtype(hidden))
        weight, vocab_size = self.head.effective_weight(), self.config.vocab_size
        with torch.autocast(hidden.device.type, enabled=False):
            if self.loss_chunk and torch.is_grad_enabled():
                return ChunkedCrossEntropy.apply(hidden, weight, targets, vocab_size, self.loss_chunk)
            head, chunk = weight[:vocab_size].to(hidden.dtype), self.loss_chunk or len(targets)
            pairs = zip(hidden.split(chunk), targets.split(chunk))
            return torch.cat([F.cross_entropy(wide_logits(h, head), t, reduction="none") for h, t in pairs]).mean()

    @torch.no_grad()
    def generate(self, idx: Tensor, tokens: int, temperature: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """Appends `tokens` sampled tokens to idx (B, T); the model sees the last block_size of them."""
        for _ in range(tokens):
            logits, _ = self(idx[:, -self.config.block_size :])
            probability = (logits[:, -1].float() / temperature).softmax(-1)
            idx = torch.cat((idx, torch.multinomial(probability, 1, generator=generator)), dim=1)
        return idx


def parameter_count(model: GPT, active: bool = False) -> int:
    """Parameters of the model, a tied matrix once; `active`: only those that one token passes through."""
    total = sum(parameter.numel() for parameter in model.parameters())
    idle = sum(module.idle_parameters() for module in model.modules() if isinstance(module, MoE))
    return total - idle if active else total


def scale_parameter_count(model: nn.Module) -> int:
    """Parameters of all scale vectors, α, β and b included."""
    vectors = (module for module in model.modules() if isinstance(module, ScaleVector))
    return sum(parameter.numel() for vector in vectors for parameter in vector.parameters())


def flops_per_token(model: GPT) -> int:
    """FLOPs of forward and backward for one training token: 6 a matmul weight + 12 n_layer d_attention T.

    Active parameters only; the embedding is a look-up and the scale vectors are no matmuls, so neither
    counts. Attention as if unmasked, the convention of PaLM (arXiv 2204.02311, appendix B).
    """
    config = model.config
    outside = scale_parameter_count(model) + (0 if model.tied else model.embedding.weight.numel())
    attention = 12 * config.n_layer * config.n_head * config.head_dim * config.block_size
    return 6 * (parameter_count(model, active=True) - outside) + attention


def main() -> None:
    """The demonstration: the table of sizes."""
    from configs.sizes import SIZES, build  # upward, for the demonstration alone

    print(f"{'size':10} {'parameters':>15} {'active':>15} {'scales':>9} {'FLOPs a token':>14}")
    for name in SIZES:
        config = build(name, "plain").resolved()
        with torch.device("meta"):
            model = GPT(config.model, config.scale, config.moe)
        counts = parameter_count(model), parameter_count(model, active=True), scale_parameter_count(model)
        print(f"{name:10} {counts[0]:15,} {counts[1]:15,} {counts[2]:9,} {flops_per_token(model):14.2e}")


if __name__ == "__main__":
    main()
