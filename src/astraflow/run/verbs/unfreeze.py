"""Train a policy of a run that goes on further, which was frozen: to the end that the recipe names."""

from __future__ import annotations

import asyncio

from astraflow.run.verbs import freeze

Args = freeze.Args


def main(args: freeze.Args) -> int:
    from astraflow.run.operate import operate
    from astraflow.wire.messages import OperatorRequest

    around = asyncio.run(operate(args.run, OperatorRequest(action="unfreeze", policy=args.policy), ca=args.ca))
    if around is None or around.was_frozen(args.policy):
        said = "is trained again; the launcher starts its trainer, without one start 'astraflow trainer'"
    elif args.policy in around.trained:
        said = "is trained already: it was not frozen"
    else:
        said = "was not frozen: it has all its steps"
    print(f"{args.policy} {said}")
    for line in around.over_lines(args.run) if around else ():
        print(line)
    return 0
