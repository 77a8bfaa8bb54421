"""Megatron-LM and megatron-core 0.19: entry point, plan, roles, and one rank's recording."""

from primus_ext.frameworks.megatron.entry import install

__all__ = ["install"]
