"""Ops of the stand-in of Transformer Engine's compiled extension."""
