"""Projection of Megatron training jobs: memory and time of a step, without training."""

__version__ = "0.1.0"
