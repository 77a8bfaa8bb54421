"""The ``primus-ext`` command."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from primus_ext import __version__
from primus_ext.conf_dir import hydra_conf_dir
from primus_ext.runner import (
    Exit,
    UsageError,
    databases,
    fit_runs,
    measure_collectives,
    say,
    validate_runs,
)
from primus_ext.runner.outcome import VERDICT_FILE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        arguments: By default those of the process.

    Returns:
        The exit code.

    Raises:
        SystemExit: 2 for arguments that argparse refuses, 0 after ``--help`` or ``--version``.
    """
    asked = _parser().parse_args(arguments)
    try:
        return int(asked.run(asked))
    except UsageError as error:
        say(str(error))
        return Exit.USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="primus-ext",
        description="Memory and time of one step of a Megatron training job, without running it. "
        "A job is projected by adding +projection=simulate +target_cluster=NAME_AxB to its own "
        "Hydra command.",
    )
    parser.add_argument("--version", action="version", version=f"primus-ext {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    targets = commands.add_parser("targets", help="list what +target_cluster can name")
    targets.set_defaults(run=_targets)
    verdict = commands.add_parser(
        "verdict",
        help="say how a projection ended, and end with its exit code",
        description="Say how a projection ended, and end with its exit code: launchers such as "
        "torchrun turn every code of their workers into 1.",
    )
    verdict.add_argument("directory", type=Path, help="its output folder (+projection.out)")
    verdict.set_defaults(run=_verdict)
    _cluster_parser(commands)
    _database_parser(commands)
    check = commands.add_parser(
        "validate",
        help="project published, measured runs and compare",
        description="Project every run of a runs file in simulate mode, without fitting anything, "
        "and print projected over measured step time.",
    )
    check.add_argument("runs", type=Path, help="runs file, e.g. validation/sanity_runs.yaml")
    check.add_argument("--subset", help="a subset named in the subsets file beside the runs file")
    check.add_argument(
        "--run", dest="ids", action="append", default=[], metavar="ID", help="only this run"
    )
    check.add_argument(
        "--rows", choices=("newest", "all"), default="newest",
        help="score only the newest row of each configuration (the default), or all",
    )  # fmt: skip
    check.add_argument(
        "--memory", choices=("published", "all"), default="published",
        help="project the memory of runs with a published peak (the default), or of all",
    )  # fmt: skip
    check.add_argument("--json", type=Path, metavar="OUT", help="write the result there")
    check.set_defaults(run=_validate)
    fit = commands.add_parser(
        "fit",
        help="fit what training reaches of short runs to measured runs",
        description="Fit the factors between short runs and training to the step times of complete "
        "pretraining runs, and print the errors of runs left out of the fit.",
    )
    fit.add_argument("runs", type=Path, help="runs file")
    fit.add_argument("--out", type=Path, metavar="DIR",
                     help="folder for GENERATION.yaml (default: the installed one)")
    fit.add_argument("--report", type=Path, metavar="FILE", help="write the errors there, Markdown")
    fit.set_defaults(run=_fit)
    sweep = commands.add_parser(
        "collectives",
        help="measure the collectives of this machine",
        description="Time all kinds of collectives over the devices of this machine, or over "
        "processes on its cores, with the real library, and fit lines to the times. "
        "+projection.collectives=OUT prices a job's collectives with them.",
    )
    sweep.add_argument("--out", type=Path, required=True, help="file for times and lines (JSON)")
    for name, text in _SWEEP_OPTIONS.items():
        many = name in ("kinds", "sizes", "members", "dtypes")
        sweep.add_argument(f"--{name}", help=text, nargs="+" if many else None)
    sweep.set_defaults(run=_collectives)
    return parser


_SWEEP_OPTIONS = {
    "processes": "default: one a device; on CPUs one a core",
    "device": "cpu or cuda; default: cuda if there is one",
    "kinds": "of collectives; default: all",
    "sizes": "bytes; default: powers of two",
    "members": "group sizes; default: 2, 3, 4 and powers of two",
    "dtypes": "of the numbers that are added; default: fp32 bf16",
    "rounds": "through everything; default: 3",
    "timeout": "seconds after which a collective counts as hanging; default: 60",
    "accelerator": "file of hydra_conf/accelerator that describes the device",
}


def _collectives(asked: argparse.Namespace) -> int:
    options: list[str] = []
    for name in _SWEEP_OPTIONS:
        given = getattr(asked, name)
        if given is not None:
            options += [f"--{name}", *(given if isinstance(given, list) else [given])]
    return measure_collectives(asked.out, options)


def _fit(asked: argparse.Namespace) -> int:
    return fit_runs(asked.runs, asked.out, asked.report)


def _cluster_parser(commands: argparse._SubParsersAction) -> None:
    cluster = commands.add_parser("cluster", help="make accelerator and target files")
    actions = cluster.add_subparsers(required=True, metavar="ACTION")
    taken = actions.add_parser(
        "import",
        help="from Primus's hardware files and logs of nccl-tests or rccl-tests",
        description="Read a hardware file of Primus (YAML) or a log of nccl-tests or rccl-tests, "
        "and write what it says as files of this package: OUT/accelerator.yaml, where it says "
        "something of the accelerator, and OUT/target.yaml.",
    )
    taken.add_argument("file", type=Path, help="hardware file (.yaml) or log")
    taken.add_argument("--accelerator", help="shipped accelerator that it describes")
    taken.add_argument("--nodes", type=int, default=1, help="of the target (default 1)")
    taken.add_argument("--gpus-per-node", type=int, default=8, help="of the target (default 8)")
    taken.add_argument("--out", type=Path, required=True, help="folder for the files")
    taken.set_defaults(run=_import)


def _database_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("db", help="the latency database: measured times of ops")
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    def action(name: str, words: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
        made.add_argument("--db", type=Path, metavar="FILE", help="the database (default: "
                          "$PRIMUS_EXT_DB, else $XDG_DATA_HOME/primus_ext/latency.sqlite)")
        return made

    stats = action("stats", "tell what is in the database")
    stats.set_defaults(run=lambda asked: databases().stats(asked.db))
    export = action("export", "write rows to a file of JSON lines, which import reads back")
    export.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file")
    export.add_argument("--origin", choices=("measured", "imported"), help="only such rows")
    export.set_defaults(run=lambda asked: databases().export(asked.db, asked.out, asked.origin))
    taken = action("import", "take in an exported file, operator figures in YAML, or the tables "
                   "of aiconfigurator-core")  # fmt: skip
    taken.add_argument("source", help="a file, or aiconfigurator-core")
    taken.add_argument("--accelerator", metavar="NAME", help="whose tables, e.g. h100")
    taken.set_defaults(
        run=lambda asked: databases().import_(asked.db, asked.source, asked.accelerator)
    )
    _needs_parser(action("missing", "tell what configurations need that is not there"))
    measure = _needs_parser(
        action("measure", "measure on this machine what configurations need that is not there")
    )
    measure.add_argument("--repetitions", type=int, default=7, metavar="N",
                         help="samples of each op (default 7)")
    measure.add_argument("--all", action="store_true", help="interpolate nothing")
    measure.add_argument("--sweep", action="store_true",
                         help="measure the same layers with fewer tokens too")
    measure.add_argument("--budget", type=float, metavar="SECONDS",
                         help="stop after so much device time")
    measure.set_defaults(
        run=lambda asked: databases().measure(
            asked.db, asked.models, asked.target, asked.device, asked.repetitions, asked.all,
            asked.sweep, asked.budget,
        )
    )  # fmt: skip
    prune = action("prune", "remove rows for which all holds that is asked")
    prune.add_argument("--source", default="", help="part of the name of their source")
    prune.add_argument("--device", default="", help="part of the name of their device")
    prune.add_argument("--before", default="", metavar="TIME", help="taken before (ISO 8601)")
    prune.add_argument("--unsteady", action="store_true", help="whose samples scatter")
    prune.add_argument("--superseded", action="store_true", help="that were measured again")
    prune.set_defaults(
        run=lambda asked: databases().prune(
            asked.db, asked.source, asked.device, asked.before, asked.unsteady, asked.superseded
        )
    )


def _needs_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("models", type=Path, help="models, e.g. validation/latency_db_models.yaml")
    parser.add_argument("--target", metavar="NAME", help="accelerator that their programs are "
                        "recorded for (default: the one that is here, else h100)")  # fmt: skip
    parser.add_argument("--device", help="as torch names it (default: cuda where there is a GPU, "
                        "else cpu)")  # fmt: skip
    parser.set_defaults(
        run=lambda asked: databases().missing(asked.db, asked.models, asked.target, asked.device)
    )
    return parser


def _import(asked: argparse.Namespace) -> int:
    import yaml  # no other command reads clusters

    from primus_ext import cluster_import
    from primus_ext.cluster_files import ClusterError

    try:
        found = cluster_import.read(asked.file, asked.accelerator)
    except ClusterError as error:
        say(str(error))
        return Exit.USAGE
    asked.out.mkdir(parents=True, exist_ok=True)
    name = found.base
    if found.accelerator is not None:
        path = (asked.out / "accelerator.yaml").resolve()
        path.write_text(yaml.safe_dump(found.accelerator, sort_keys=False, width=96))
        name = str(path)
    target = cluster_import.target_file(name, asked.nodes, asked.gpus_per_node, found)
    (asked.out / "target.yaml").write_text(target)
    print(*found.notes, sep="\n")
    return Exit.DONE


def _validate(asked: argparse.Namespace) -> int:
    return validate_runs(
        asked.runs, asked.subset, asked.ids, asked.json, asked.rows, asked.memory
    )


def _targets(_asked: argparse.Namespace) -> int:
    shapes: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for path in (hydra_conf_dir() / "target_cluster" / "target_cluster").glob("*.yaml"):
        accelerator, _, shape = path.stem.rpartition("_")
        nodes, _, gpus = shape.partition("x")
        shapes[accelerator].append((int(nodes), int(gpus)))
    for accelerator in sorted(shapes):
        print(f"{accelerator}:", *(f"{a}x{b}" for a, b in sorted(shapes[accelerator])))
    print("NAME_AxB is A nodes of B GPUs, for example +target_cluster=h100_8x8")
    return Exit.DONE


def _verdict(asked: argparse.Namespace) -> int:
    path: Path = asked.directory / VERDICT_FILE
    try:
        ended = json.loads(path.read_text())
        code, message = int(ended["exit_code"]), str(ended["message"])
    except FileNotFoundError:
        say(f"{path} does not exist: no projection ended there")
        return Exit.USAGE
    except (OSError, ValueError, KeyError, TypeError) as error:
        say(f"{path} can't be read as a verdict: {error}")
        return Exit.USAGE
    print(message)
    return code
