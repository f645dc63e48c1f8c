"""500M parameters with Gemma's sandwich norms and QK-norm: many Output-Norms, where the decay policy shows.

Compare `--optim.scale_decay=iwd` with all, none and reverse.
"""

from configs.sizes import build

config = build("500m", "plain", qk_norm=True, post_norm=True)
