"""Starting scripts/train.py and its parts in fresh processes, for tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "train.py"
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**changes):
    """This environment without a launcher's variables, one thread a process."""
    clean = {k: v for k, v in os.environ.items() if k not in _LAUNCHER}
    return clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | changes


def run_python(code, **changes):
    """Run ``code`` in a fresh process; its failure is ours.  Returns its standard output."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        text=True, capture_output=True, env=environment(**changes), timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def probe(jobs, tmp_path_factory):
    """What scripts/train.py makes of configurations, see ``probe_train.py``."""
    out = tmp_path_factory.mktemp("probe") / "answers.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "probe_train.py"), str(out)],
        input=json.dumps(jobs), text=True, capture_output=True, env=environment(), timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def train(folder, *overrides, processes=1, **changes):
    """Run scripts/train.py in ``folder``; returns the finished process."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone",
                     f"--nproc-per-node={processes}"]  # fmt: skip
    return subprocess.run(
        [*launcher, str(SCRIPT), "hydra.run.dir=hydra", *overrides],
        cwd=folder, text=True, capture_output=True, env=environment(**changes), timeout=900,
    )  # fmt: skip


def scalars(path):
    """``{(step, name): value}`` of a log that ``train.log_jsonl`` names."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return {(line["step"], line["name"]): line["value"] for line in lines}
