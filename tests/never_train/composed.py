"""A program that composes its configuration itself, so that no callback of Hydra's ever runs."""

import sys

import body
from hydra import compose, initialize

with initialize(version_base=None, config_path="conf"):
    body.touch(f"cfg {compose('plain', overrides=sys.argv[1:])}")
body.train()
