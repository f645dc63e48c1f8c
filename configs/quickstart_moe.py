"""The quickstart as a mixture of experts: 8 experts, of which a token passes 2, and a shared one; AdamW."""

from dataclasses import replace

from configs.quickstart import config as dense
from moe import MoEConfig
from optim import OptimConfig

config = replace(
    dense,
    moe=MoEConfig(n_expert=8, top_k=2, n_shared=1, d_ff=128),
    optim=OptimConfig(learning_rate=2e-3),
    train=replace(dense.train, max_steps=1000, compile=False),
)
