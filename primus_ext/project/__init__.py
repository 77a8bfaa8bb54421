"""Compose priced traces into memory per rank and time per step."""
