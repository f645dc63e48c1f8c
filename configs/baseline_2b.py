"""2B parameters, plain scale vectors: what the others are compared with."""

from configs.sizes import build

config = build("2b", "plain")
