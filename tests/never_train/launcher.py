"""An app whose training runs in processes that it starts itself, in one of three ways."""

import multiprocessing
import os
import runpy
import subprocess
import sys

import body
import hydra


@hydra.main(version_base=None, config_path=None)
def main(cfg) -> None:
    way = os.environ["NEVER_TRAIN_LAUNCH"]
    if way == "script":
        subprocess.run([sys.executable, __file__, "inner"], check=True)
    elif way == "torchrun":
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        subprocess.run([*launch, "--master-port=0", __file__, "inner"], check=True)
    else:
        worker = multiprocessing.get_context(way).Process(target=body.train)
        worker.start()
        worker.join()


if __name__ == "__main__":
    if sys.argv[1:] == ["inner"]:
        runpy.run_module("body")["train"]()
    else:
        main()
