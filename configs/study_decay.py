"""Which scale vectors should decay: none, input ones (iwd), output ones (reverse), or all?

The model is that of configs/study_d24.py with the most Output-Norms it can have, Gemma's sandwich with QK-norm. In the arms
with a policy's bare name scale vectors decay four times as strongly as matrices (Σ η λ = 7.2), so that what it does can show;
in those named x1, as strongly as they. One rate for all, that tuned for plain_qknorm in the study of that width.
"""

from dataclasses import replace

from ablate import Study
from configs.study_d24 import study as d24

RATE, DECAY = 1.7e-2, d24.base.optim.decay_matrix
POLICIES = ("iwd", "all", "reverse")


def arm(policy: str, strength: float) -> dict:
    """The overrides of a policy whose scale vectors decay `strength` times as much as matrices."""
    decay = {f"optim.decay_{role}": strength * DECAY for role in ("input_scale", "output_scale")}
    return {"optim.scale_decay": policy} | decay


study = Study(
    base=replace(
        d24.base,
        model=replace(d24.base.model, qk_norm=True, post_norm=True),
        optim=replace(d24.base.optim, learning_rate=RATE),
    ),
    arms={policy: arm(policy, 4) for policy in ("none", *POLICIES)} | {f"{policy}_x1": arm(policy, 1) for policy in POLICIES},
    seeds=tuple(range(8)),
    baseline="none",
    comparisons={"all": "iwd", "reverse": "iwd", "all_x1": "iwd_x1", "reverse_x1": "iwd_x1"},
    smallest_difference=0.003,
)
