"""Hydra's plugin discovery finds primus_ext here."""
