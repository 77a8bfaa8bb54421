"""Record what a rank does: ops, collectives and live tensor bytes."""
