"""What dataflow must know of a recipe: no models, no engines, no losses."""

from __future__ import annotations

from astraflow.algorithms.pipeline import Pipeline
from astraflow.dataflow.settings import EvalSpec, PolicySpec, RunSpec
from astraflow.run.config import Resolved


def run_spec(resolved: Resolved, run: str) -> RunSpec:
    """``run``: the name of the run folder."""
    recipe = resolved.recipe
    assert isinstance(recipe.pipeline, Pipeline), "a resolved recipe has its pipeline built"
    evaluation = None
    if recipe.eval is not None:
        evaluation = EvalSpec(
            tasks=recipe.eval.tasks,
            count=recipe.eval.count,
            every=recipe.eval.every,
            episodes=recipe.eval.episodes,
            policy=recipe.eval.policy,
            passing=recipe.eval.passing,
        )
    return RunSpec(
        run=run,
        seed=recipe.seed,
        steps=recipe.steps,
        policies={
            name: PolicySpec(
                trainable=policy.trainable,
                max_staleness=policy.max_staleness,
                groups_per_batch=policy.groups_per_batch,
                steps=policy.steps,
                keep_every=policy.keep_every,
                average_of=policy.average_of,
            )
            for name, policy in recipe.policies.items()
        },
        roles=recipe.casting,
        pipeline=recipe.pipeline,
        eval=evaluation,
        limits=recipe.limits,
        scaling=recipe.scaling,
        config_digest=resolved.digest,
        code_digest=resolved.code_digest,
        config=resolved.settings(),
    )
