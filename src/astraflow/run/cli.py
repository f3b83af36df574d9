"""``astraflow VERB …``: a table of verbs, each a small file of its own that is imported only when it is asked for."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from astraflow.errors import AstraFlowError

VERBS: dict[str, str] = {
    "run": "train: dataflow, rollout services and trainers on this machine",
    "plan": "resolve a recipe and do its arithmetic; runs nothing",
    "status": "who does what, who waits for what",
    "pool": "the rollout workers: region, versions, rate, staleness, why one does not serve",
    "autoscale": "start and stop rollout workers as the run needs them",
    "ledger": "where every episode, group and sample of a run is; exit 1 if that does not balance",
    "trace": "the journey of one episode",
    "replay": "a run's recorded past under other algorithms, side by side with what happened",
    "doctor": "why a loss is flat or zero: what is normal in a run, what is broken; exit 1 if something is",
    "freeze": "end one policy of a run that goes on at the version that it has",
    "unfreeze": "train a policy on that was frozen",
    "swap": "let a frozen policy play with a past version of another",
    "add-policy": "let a new policy join a run that goes on, trained, frozen, or a moving average",
    "cast": "let another policy play a role from now on",
    "resume": "go on with a run that was stopped",
    "eval": "held-out score of a model folder",
    "tasks features": "a vector for each task by a model, for algorithms that compare tasks",
    "models get": "build a known model's folder",
    "models export": "a version of a run as a folder that from_pretrained loads",
    "bench": "one measurement against a fair rival",
    "dataflow": "the dataflow service alone",
    "rollout": "a rollout service alone, for a dataflow elsewhere",
    "trainer": "the trainer of one policy alone",
}

USELESS_AGAIN = ("ConfigError", "BadRequest", "ConfigMismatch", "Unauthorised", "Forbidden")
"""Errors that the same call will meet again: exit code 2, the launcher does not try it a second time."""


STDOUT = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 (the run or command failed), 2 (wrong arguments or recipe), 130 (interrupted)."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except AstraFlowError as error:
        if debug:
            raise
        _say_error(str(error))
        return 2 if error.kind in USELESS_AGAIN else 1
    except KeyboardInterrupt:
        print("astraflow: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # of ``astraflow … | head``: nobody reads on, and nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if debug:
            raise
        _say_error(_of_the_system(error))
        return 1


def _say_error(message: str) -> None:
    from astraflow.observe.terminal import harmless

    print(f"astraflow: {harmless(message)}", file=sys.stderr)


def _of_the_system(error: OSError) -> str:
    """Whatever nobody below has put into words of his own."""
    from astraflow.disk import is_full, refusal

    place = error.filename or ("standard output" if _standard_output_is_lost() else None)
    if place is None:
        return f"{error}; make room on the disks that this command writes to" if is_full(error) else str(error)
    if is_full(error) or error.filename is None:
        return str(refusal(place, error, "lead it elsewhere" if error.filename is None else ""))
    return f"{place}: {error.strerror}; it must be there, and this user must be able to use it"


def _standard_output_is_lost() -> bool:
    """Nothing printed can be written: asked by an empty line, since what could not be is forgotten by now. The
    interpreter is not to complain of it once more at its end."""
    try:
        sys.stdout.flush()
        os.write(STDOUT, b"\n")
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
        return True
    return False


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0 if words else 2
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"astraflow {version('astraflow')}")
        return 0
    for length in (2, 1):
        verb = " ".join(words[:length])
        if verb in VERBS:
            return _call(verb, words[length:])
    print(f"astraflow: {_unknown(words)}", file=sys.stderr)
    return 2


def _call(verb: str, words: list[str]) -> int:
    import tyro

    module = importlib.import_module(f"astraflow.run.verbs.{verb.replace(' ', '_').replace('-', '_')}")
    args = tyro.cli(
        module.Args,
        args=_one_value_per_set(words),
        prog=f"astraflow {verb}",
        description=f"{module.__doc__}",
        config=(tyro.conf.UseAppendAction, tyro.conf.FlagCreatePairsOff),
    )
    return int(module.main(args))


def _one_value_per_set(words: list[str]) -> list[str]:
    """``--set a=1 b=2`` is ``--set a=1 --set b=2``; what has no ``=`` is no further value."""
    out: list[str] = []
    is_set = False
    for word in words:
        is_value = is_set and "=" in word and not word.startswith("-")
        if is_value and out[-1] != "--set":
            out.append("--set")
        is_set = word == "--set" or is_value
        out.append(word)
    return out


LIKE = 0.6
"""How much of a word must be right for a verb to be meant."""


def _unknown(words: list[str]) -> str:
    import difflib

    def likeness(verb: str) -> float:
        return difflib.SequenceMatcher(None, " ".join(words[: len(verb.split())]), verb).ratio()

    nearest = max(VERBS, key=likeness)
    hint = f"; did you mean {nearest!r}?" if likeness(nearest) >= LIKE else ";"
    return f"there is no verb {words[0]!r}{hint} 'astraflow --help' lists them"


def _usage() -> str:
    width = max(len(verb) for verb in VERBS) + 2
    lines = ["usage: astraflow VERB [--help] …", ""]
    lines += [f"  {verb.ljust(width)}{text}" for verb, text in VERBS.items()]
    return "\n".join([*lines, "", "Every verb takes --help, and --debug for a traceback."])


if __name__ == "__main__":
    sys.exit(main())
