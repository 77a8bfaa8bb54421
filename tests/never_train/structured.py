from dataclasses import dataclass

import body
import hydra
from hydra.core.config_store import ConfigStore


@dataclass
class Config:
    model: str = "gpt3"
    precision: str = "bf16"
    accelerator: str = "cpu"
    cluster: str = "a"
    steps: int = 2


ConfigStore.instance().store(name="config", node=Config)


@hydra.main(version_base=None, config_name="config")
def main(cfg) -> None:
    body.touch(f"cfg {cfg}")
    body.train()


if __name__ == "__main__":
    main()
