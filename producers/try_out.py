"""`python -m producers.try_out FLAGS...`: whether a run with these flags could evaluate; `millpond run` asks before it
starts anything. Says what is wrong, and ends with its exit code."""

from __future__ import annotations

import os
import sys

from pipeline.config import EvalWork, RunConfig
from pipeline.errors import MillpondError
from pipeline.flags import parse
from producers.evaluate import try_out


def main(argv: list[str]) -> int:
    try:
        run = parse(RunConfig, argv, os.environ, "millpond run")
        try_out(EvalWork(**{name: getattr(run, name) for name in EvalWork.model_fields}))
    except MillpondError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
