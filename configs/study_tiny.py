"""A study to try: three arms and three seeds of a model far too small to learn from, about a minute on two cores."""

from ablate import Study
from config import Config, TrainConfig
from data import DataConfig
from model import ModelConfig
from optim import OptimConfig

study = Study(
    base=Config(
        model=ModelConfig(n_layer=1, n_head=2, d_model=16, vocab_size=257, vocab_multiple=1, block_size=32),
        optim=OptimConfig(learning_rate=5e-3),
        data=DataConfig(eval_tokens=20_480),
        train=TrainConfig(max_steps=200, tokens_per_step=1024, micro_batch=32, eval_interval=25),
    ),
    arms={
        "plain": {},
        "none": {"scale.strategy": "none"},
        "unified": {"scale.strategy": "unified"},
    },
    seeds=(0, 1, 2),
    learning_rates={"plain": [2e-3, 5e-3, 1e-2]},
    tuning={"data.eval_start": 204_800},
    smallest_difference=0.01,
)
