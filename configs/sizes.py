"""The table of model sizes, and `build`, which makes a run of one of them.

Widths and depths are the paper's (arXiv 2605.26895); peak rates are starting values of ours, to be tuned.
"""

from config import Config, TrainConfig
from data import DataConfig
from model import ModelConfig
from moe import MoEConfig
from norms import ScaleConfig
from optim import OptimConfig

# size: (d_model, n_head, n_layer, tokens a step, peak learning rate, experts)
SIZES = {
    "120m": (768, 12, 6, 2**18, 1e-3, None),
    "250m": (1024, 16, 12, 2**18, 8e-4, None),
    "500m": (1280, 20, 20, 2**19, 6e-4, None),
    "1b": (1792, 14, 22, 2**20, 5e-4, None),
    "2b": (2304, 18, 28, 2**21, 4e-4, None),
    "moe_500m": (768, 12, 12, 2**18, 8e-4, dict(n_expert=28, top_k=3, n_shared=1, d_ff=512)),
    "moe_2b": (1280, 20, 20, 2**20, 5e-4, dict(n_expert=44, top_k=5, n_shared=1, d_ff=512)),
}


def build(size: str, strategy: str, **model) -> Config:
    """A run of `size` on FineWeb-Edu in GPT-2 tokens, 100 tokens a parameter; `model` overrides the shape."""
    d_model, n_head, n_layer, tokens_per_step, learning_rate, experts = SIZES[size]
    return Config(
        model=ModelConfig(**{"d_model": d_model, "n_head": n_head, "n_layer": n_layer, **model}),
        scale=ScaleConfig(strategy=strategy),
        moe=MoEConfig(**experts) if experts else None,
        optim=OptimConfig(learning_rate=learning_rate),
        data=DataConfig(source="fineweb-edu", tokenizer="gpt2"),
        train=TrainConfig(tokens_per_step=tokens_per_step, checkpoint_interval=1000, eval_interval=1000),
    )
