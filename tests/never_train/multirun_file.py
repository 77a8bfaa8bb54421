import body
import hydra


@hydra.main(version_base=None, config_path="conf", config_name="multirun_file")
def main(cfg) -> None:
    body.touch(f"cfg {cfg}")
    body.train()


if __name__ == "__main__":
    main()
