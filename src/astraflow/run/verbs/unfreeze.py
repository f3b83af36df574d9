"""Train a policy of a run that goes on further, which was frozen: to the end that the recipe names."""

from __future__ import annotations

from astraflow.run.verbs import freeze

Args = freeze.Args
TRAINED = "is trained again; the launcher starts its trainer, without one start 'astraflow trainer'"


def main(args: freeze.Args) -> int:
    return freeze.main(args, action="unfreeze", said=TRAINED)
