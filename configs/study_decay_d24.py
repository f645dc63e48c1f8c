"""Which scale vectors should decay, at width 24: as strongly as matrices, and four times as strongly?

The policies of configs/study_decay.py on the model of configs/study_d24.py. In the arms with a policy's bare name scale vectors
decay four times as strongly as matrices (Σ η λ = 7.2), so that what it does can show; in those named x1, as strongly as they.
One rate for all, that tuned for plain_qknorm in the study of that width.
"""

from dataclasses import replace

from ablate import Study
from configs.study_d24 import study as d24
from configs.study_decay import OUTPUT_NORMS, arm

RATE, DECAY = 1.7e-2, d24.base.optim.decay_matrix
POLICIES = ("iwd", "all", "reverse")

study = Study(
    base=replace(d24.base, model=replace(d24.base.model, **OUTPUT_NORMS)),
    arms={policy: arm(policy, RATE, 4 * DECAY) for policy in ("none", *POLICIES)}
    | {f"{policy}_x1": arm(policy, RATE, DECAY) for policy in POLICIES},
    baseline="none",
    comparisons={"all": "iwd", "reverse": "iwd", "all_x1": "iwd_x1", "reverse_x1": "iwd_x1"},
)
