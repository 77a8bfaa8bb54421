"""The Hydra side: search path, callback."""
