"""Is removing γ worse? One question, on seeds of its own: none and plain as in configs/study_cpu.py, each at its own rate.

In study_cpu none is one arm of eleven, so that Holm's correction asks much of it. Here it is the only one; its 12 seeds are
fixed before the runs, and study_cpu has none of them.
"""

from dataclasses import replace

from configs.study_cpu import study as cpu

study = replace(
    cpu,
    arms={name: cpu.arms[name] for name in ("plain", "none")},
    seeds=tuple(range(100, 112)),
    comparisons={},
    lengths=(),
    learning_rates={},
)
