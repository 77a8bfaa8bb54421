"""Answer a list of emulation requests with one start: imports cost seconds, forks milliseconds.

``python tests/emulate_many.py REQUESTS.json``; each fork is a fresh process to the program.
"""

import importlib
import json
import os
import sys
from pathlib import Path


def main(path):
    from primus_ext.emulate import bootstrap

    requests = json.loads(Path(path).read_text())
    bootstrap._install(requests[0])
    for name in ("megatron.training", "megatron.training.training", "transformer_engine.pytorch"):
        importlib.import_module(name)
    for number, request in enumerate(requests):
        one = Path(f"{path}.{number}")
        one.write_text(json.dumps(request))
        pid = os.fork()
        if pid == 0:
            os.environ["WORLD_SIZE"] = str(request["world_size"])
            bootstrap._install = lambda _: None  # it is
            bootstrap.main(str(one))
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1])
