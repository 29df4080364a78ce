"""`millpond COMMAND ...`: finds the command's module by name and imports nothing before it is needed.

This table and the supervisor (`pipeline.run`) are the only places in `pipeline` that know the other packages: by name.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping

from pipeline.errors import MillpondError, UsageError

Commands = Mapping[str, tuple[str, str]]
"name -> (module:function, help); the function takes the arguments after the name and returns the exit code"

COMMANDS: Commands = {
    "run": ("pipeline.run:main", "train a model on this machine: Redis, feeder, generators and trainer in one"),
    "feed": ("producers.cli:feed", "feed prompts from a file to a run"),
    "generate": ("producers.cli:generate", "generate and score answers; start as many as you like"),
    "worker": ("producers.worker:main", "do what must hold nobody up: evaluations, and rewards that may hang"),
    "train": ("trainer.cli:main", "train on finished groups and publish the weights"),
    "replay": ("trainer.replay:main", "train on what a run has archived, without Redis and generators"),
    "status": ("pipeline.status:main", "what waits where, who works, how old and how fast"),
    "top": ("pipeline.top:main", "the same on the whole terminal, live; q leaves"),
    "why": ("pipeline.why:main", "why a run stands still, in one sentence, and what to do"),
    "inspect": ("pipeline.inspect:main", "look into groups, prompts, dead letters, quarantine, errors"),
    "report": ("pipeline.report:main", "a run as one HTML page: curves, drops, a timeline"),
    "track": ("pipeline.track:main", "send a run's metrics to TensorBoard or W&B, serve them to Prometheus"),
    "eval": ("producers.eval_cli:main", "evaluate a run, a checkpoint or a model on sets of prompts"),
    "audit": ("pipeline.audit:main", "prove that no prompt is lost or trained twice"),
    "purge": ("pipeline.purge:main", "delete what a finished run left in Redis"),
    "sglang": ("producers.sglang_cpu.serve:main", "start a real SGLang server on CPUs, to see one without a GPU"),
    "bench": ("pipeline.bench:main", "measure codec, broker, overlap and engine"),
}

INTERRUPTED = 130


def main(argv: list[str] | None = None, commands: Commands = COMMANDS) -> int:
    """The exit code: 0 done, 1 a bug or failed check, 2 usage, 3 starved, 4 fenced, 130 interrupted.

    An error that Millpond does not raise itself passes through, with its traceback.
    """
    if argv is None:  # a process 1 has no default for it; until a stage has its own, it is like Ctrl-C
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = _dispatch(sys.argv[1:] if argv is None else argv, commands)
        sys.stdout.flush()
    except MillpondError as error:
        sys.stderr.write(f"millpond: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("millpond: asked to stop\n")
        return INTERRUPTED
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails once more
        return 0
    return code


def _dispatch(argv: list[str], commands: Commands) -> int:
    name, rest = (argv[0], argv[1:]) if argv else ("", [])
    if name in commands:
        return _target(commands[name][0])(rest)
    if name in ("-h", "--help", "help"):
        sys.stdout.write(_help(commands))
        return 0
    if name == "--version":
        sys.stdout.write(f"millpond {_version()}\n")
        return 0
    if not name:
        sys.stderr.write(_help(commands))
        return UsageError.exit_code
    raise UsageError(_unknown(name, commands))


def _target(name: str) -> Callable[[list[str]], int]:
    module, _, function = name.partition(":")
    target: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
    return target


def _help(commands: Commands) -> str:
    rows = "".join(f"  {name:<10}{text}\n" for name, (_, text) in commands.items())
    return (
        "usage: millpond COMMAND [options]\n\n"
        "Fully-asynchronous RL post-training of language models over Redis.\n\n"
        f"{rows}\nmillpond COMMAND --help lists the options of a command. Start with: millpond run\n"
    )


def _unknown(name: str, commands: Commands) -> str:
    import difflib

    found = difflib.get_close_matches(name, commands, 1)
    hint = f"did you mean {found[0]}?" if found else "see millpond --help"
    return f"unknown {'option' if name.startswith('-') else 'command'} {name!r}; {hint}"


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("millpond")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _reader_is_gone() -> bool:
    """Whether stdout is a pipe that nobody reads: a socket of our own can break too, and that is a bug."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
