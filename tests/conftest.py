"""What every test shares: the repository on the path, and tiny models of every kind."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)  # config files and data folders are named from here

import pytest
import torch

from model import GPT, ModelConfig
from norms import STRATEGIES, ScaleConfig

TINY = dict(n_layer=2, n_head=4, n_kv_head=2, d_model=24, d_ff=20, vocab_size=61, block_size=16)
SCALES = {name: ScaleConfig(strategy=name) for name in STRATEGIES} | {
    "centred": ScaleConfig(kind="centred"),
    "centred_unified": ScaleConfig(strategy="unified", kind="centred"),
    "er_hg_dp": ScaleConfig(strategy="dp", kind="er", heterogeneous=True),
    "unified_dual": ScaleConfig(strategy="unified", attention_placement="dual"),
}
SHAPES = {"plain": {}, "sandwich": {"post_norm": True, "qk_norm": True}, "heads": {"n_kv_head": 4}}


def tiny_model(scale="plain", generator=None, **shape):
    """A tiny float64 GPT; with a generator, every parameter is moved away from its first value."""
    model = GPT(ModelConfig(**{**TINY, **shape}), SCALES[scale] if isinstance(scale, str) else scale).double()
    if generator is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(1)


@pytest.fixture
def tokens(generator):
    """(2, 9) token ids of the tiny vocabulary."""
    return torch.randint(TINY["vocab_size"], (2, 9), generator=generator)
