"""What every fixture app does: start a tracker, read data, step an optimizer, write a checkpoint.

Each of these leaves a line in the file that ``NEVER_TRAIN_LOG`` names.
"""

import os


def touch(what: str) -> None:
    with open(os.environ["NEVER_TRAIN_LOG"], "a") as file:
        file.write(f"{what}\n")


def train(steps: int = 2) -> None:
    import wandb

    wandb.init(project="fixture")
    import torch

    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return steps

        def __getitem__(self, index: int) -> torch.Tensor:
            touch("data")
            return torch.ones(1) * index

    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    # An app whose data does not come from a DataLoader gets as far as the optimizer.
    batches = torch.utils.data.DataLoader(Data())
    for batch in [torch.ones(1)] * steps if os.environ.get("NEVER_TRAIN_NO_LOADER") else batches:
        (weight * batch).sum().backward()
        optimizer.step()
        touch("step")
    torch.save(weight, "checkpoint.pt")
    touch("checkpoint")
    wandb.log({"done": 1})
