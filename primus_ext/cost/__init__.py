"""Duration of an op or a collective on a target that may not exist here."""
