"""What stays of study_cpu's main differences on fresh seeds? plain, none, unified and plain_qknorm, each at its own rate.

In study_cpu these are four arms of twelve: the largest differences of many are partly luck. Here are 12 seeds that no choice
was made on, fixed before any run. First came none and plain; with their result known, unified and plain_qknorm were added on
the same seeds, for two more questions: does unified lie below plain, and below plain_qknorm?
"""

from ablate import Study
from configs.study_cpu import study as cpu

study = Study(
    base=cpu.base,
    arms={name: cpu.arms[name] for name in ("plain", "none", "unified", "plain_qknorm")},
    seeds=tuple(range(100, 112)),
    comparisons={"unified": "plain_qknorm"},
)
