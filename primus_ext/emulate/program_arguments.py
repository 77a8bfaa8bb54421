"""A program whose parser rejects its arguments says why in the answer (group ``program``)."""

from __future__ import annotations

from typing import Any, NoReturn

from primus_ext.emulate.registry import patch

GROUP = "program"


@patch("argparse", "ArgumentParser.error", group=GROUP, versions="Python 3.12",
       reason="it exits with code 2 and leaves the reason on standard error only")
def _says_why(module: Any) -> None:
    original = module.ArgumentParser.error

    def error(self: Any, message: str) -> NoReturn:
        try:
            original(self, message)
        except SystemExit as leaving:
            raise SystemExit(leaving.code) from ValueError(message)
        raise SystemExit(2)

    module.ArgumentParser.error = error
