"""The first run: the unified strategy on the text of Python's standard library, a few minutes on two CPU cores.

Muon, its rate and the width are chosen by short runs on another part of the validation split: README, "Two commands".
"""

from config import Config, TrainConfig
from data import DataConfig
from model import ModelConfig
from norms import ScaleConfig
from optim import OptimConfig

config = Config(
    model=ModelConfig(n_layer=4, n_head=4, d_model=128, d_ff=384, vocab_size=257, block_size=128),
    scale=ScaleConfig(strategy="unified"),
    optim=OptimConfig(optimizer="muon", learning_rate=8e-3),
    data=DataConfig(source="stdlib", tokenizer="bytes", eval_tokens=204_800),
    train=TrainConfig(
        max_steps=1200, tokens_per_step=2048, micro_batch=16, eval_interval=400, sample_tokens=300, compile=True
    ),
)
