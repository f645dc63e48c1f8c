"""Which scale vectors should decay: input ones (iwd), all, none, or output ones (reverse)?

The model is that of configs/study_cpu.py with the most Output-Norms it can have, Gemma's sandwich with QK-norm. The
decay of scale vectors is four times that of the matrices, Σ η λ = 7.2, so that what it does can show. The rate is the one
tuned for plain_qknorm there.
"""

from dataclasses import replace

from ablate import Study
from configs.study_cpu import DECAY, RATE_QK_NORM
from configs.study_cpu import study as cpu

base = replace(
    cpu.base,
    model=replace(cpu.base.model, qk_norm=True, post_norm=True),
    optim=replace(
        cpu.base.optim,
        learning_rate=RATE_QK_NORM,
        decay_input_scale=4 * DECAY,
        decay_output_scale=4 * DECAY,
    ),
)

study = Study(
    base=base,
    arms={policy: {"optim.scale_decay": policy} for policy in ("iwd", "all", "none", "reverse")},
    seeds=tuple(range(8)),
    baseline="iwd",
    smallest_difference=0.003,
)
