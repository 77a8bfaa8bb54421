"""Price one op or collective on an accelerator of a cluster."""
