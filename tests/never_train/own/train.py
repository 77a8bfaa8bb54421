"""An app whose own configuration package is called hydra_conf, as ours once was."""

import sys
from pathlib import Path

import hydra

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import body  # noqa: E402

import hydra_conf  # noqa: E402, F401


@hydra.main(version_base=None, config_path="pkg://hydra_conf", config_name="config")
def main(cfg) -> None:
    body.touch(f"cfg {cfg}")
    body.train()


if __name__ == "__main__":
    main()
