"""Run the user's program as one rank of the target job on a virtual accelerator."""
