"""How much memory will a training step need?

    weights + gradients + optimizer state + kept activations + one chunk of logits and the head's gradient

All float32 but for the activations, which have the dtype of the matmuls where those keep them. Nothing is
guessed about activations: the forward pass runs on fake tensors, which have shapes and no memory, and what
autograd keeps for backward is added up. torch.compile keeps less, so this is an upper estimate for it.

Try it: `python memory.py configs/unified_2b.py --train.micro_batch=1` prints the sum, part by part.
"""

from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from config import Config, command_line
from model import GPT, default_loss_chunk, parameter_count
from optim import ROLES, parameter_roles, treatment

FLOAT32 = 4


def kept_activations(config: Config, micro_batch: int, dtype: torch.dtype, blocks: int | None = None) -> int:
    """Bytes that a forward pass keeps for backward, loss left out; without checkpointing, of `blocks` blocks."""
    kept = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = (storage, storage.nbytes())  # the storage itself, so that its address is not used again
        return tensor

    shape, idle_weights = config.model, 0
    if config.moe:  # whose kernels depend on the tokens: counted as a dense block of the active width
        shape = replace(shape, d_ff=(config.moe.top_k + config.moe.n_shared) * config.moe.d_ff)
        idle = (config.moe.n_expert - config.moe.top_k) * config.moe.d_ff * 3 * shape.d_model
        idle_weights = idle * (blocks or shape.n_layer) * dtype.itemsize  # effective weights of the other experts
    with FakeTensorMode():
        model = GPT(shape, config.scale)
        model.blocks = model.blocks[:blocks]
        model.activation_checkpointing = config.train.activation_checkpointing and blocks is None
        weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        idx = torch.zeros(micro_batch, config.model.block_size, dtype=torch.int64)
        hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            model.hidden(idx)
    return idle_weights + sum(size for address, (_, size) in kept.items() if address not in weights)


def optimizer_bytes(config: Config) -> int:
    """AdamW keeps two moments of each parameter, Muon one."""
    with torch.device("meta"):
        model = GPT(config.model, config.scale, config.moe)
    roles = parameter_roles(model)
    moments = {role: 1 if treatment(role, config.optim).optimizer == "muon" else 2 for role in ROLES}
    return sum(FLOAT32 * moments[roles[name]] * parameter.numel() for name, parameter in model.named_parameters())


def memory_estimate(config: Config, micro_batch: int, dtype: torch.dtype, processes: int = 1) -> dict[str, int]:
    """Bytes a process, part by part, of one training step of a resolved config; "all" is the sum."""
    with torch.device("meta"):
        parameters = parameter_count(GPT(config.model, config.scale, config.moe))
    tokens, vocabulary = micro_batch * config.model.block_size, config.model.padded_vocab_size
    chunk = default_loss_chunk(vocabulary) if config.train.loss_chunk is None else config.train.loss_chunk
    activations = kept_activations(config, micro_batch, dtype)
    if config.train.activation_checkpointing:  # backward computes one block again and keeps all of it
        activations += kept_activations(config, micro_batch, dtype, blocks=1)
    parts = {
        "weights": FLOAT32 * parameters,
        "gradients": FLOAT32 * parameters,
        "optimizer": optimizer_bytes(config) // (processes if config.train.shard_optimizer else 1),
        "activations": activations,
        "loss": FLOAT32 * vocabulary * (min(tokens, chunk or tokens) + config.model.d_model),
    }
    return parts | {"all": sum(parts.values())}


def format_estimate(parts: dict[str, int]) -> str:
    """One line: GB of each part."""
    rest = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in parts.items() if name != "all")
    return f"{parts['all'] / 1e9:.3g} GB a process, estimated: {rest}"


def main() -> None:
    """The command line: the estimate of a config in both dtypes."""
    config = command_line("usage: python memory.py CONFIG [--section.key=value ...]")
    for dtype in (torch.float32, torch.bfloat16):
        estimate = memory_estimate(config, config.train.micro_batch, dtype)
        print(f"micro-batch {config.train.micro_batch}, {str(dtype).removeprefix('torch.')}: {format_estimate(estimate)}")


if __name__ == "__main__":
    from config import run_command

    run_command(main)
