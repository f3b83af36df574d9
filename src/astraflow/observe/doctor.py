"""Why is a loss flat or zero? From numbers of one policy to findings, each with what is normal, and one verdict. Pure.

    Symptoms ── CHECKS, causes before effects ──► findings ──► the first of the worst is the verdict

A loss near zero alone is no illness: without a critic, advantages of a group sum to zero and the ratio begins at 1, so
that the *value* of a group-relative loss is about 0 while its gradient is not. What tells is the gradient's norm and
what it is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from astraflow.observe.doctor_critic import CRITIC_CHECKS, has_critic
from astraflow.observe.findings import Finding, State, Symptoms, above, below, recent
from astraflow.observe.terminal import harmless

RECENT_GROUPS = 200
FEW_GROUPS = 8
"""One batch of the default size: shares of fewer groups say nothing."""

FLAT_WATCH, FLAT_BROKEN = 0.5, 0.95
"""Share of groups without variance. Runs that learn go up to 0.8 as tasks are mastered, which costs samples and no
correctness; beyond 0.95 one batch takes the episodes of twenty, and what is left is mostly the grader's noise."""
CLIP_WATCH, CLIP_BROKEN = 0.1, 0.3
"""Share of tokens on which the clip acts: most losses give them no gradient, cispo and sapo less of one. Published runs
clip 0.001 to 0.03; at 0.3 the batch is too stale, or the log-probs are not those of the policy that sampled."""
GAP_WATCH, GAP_BROKEN = 0.05, 0.2
"""Mean |log-prob of trainer - log-prob of engine| in nats, same weights. bf16 on both sides gives 0.005 to 0.03, fp32
1e-5; 0.2 is a ratio of 1.22, outside PPO's clip range before anything was learnt: temperature, template or weights."""
RATIO_BROKEN = 1e-3
"""Share of tokens with a ratio beyond e^20: no staleness does that, only log-probs of something else."""
COVERAGE_WATCH, COVERAGE_BROKEN = 0.8, 0.5
"""Share of the tokens in trained groups that got a gradient; the rest was sampled for nothing."""
ON_PURPOSE = "not_chosen"
"""Reason of ``keep_subset.MaxVariance``, which samples more than it trains: such tokens are in no share."""
ENTROPY_WATCH, ENTROPY_BROKEN = 0.1, 0.01
"""Nats a token. At 0.1 a token's best choice has about 0.98, at 0.01 about 0.999: episodes of a group are then the same
and no advantage is left."""
LEFT_OUT_WATCH, LEFT_OUT_BROKEN = 0.5, 0.95
"""Share of groups that Keep drops for another reason than want of signal: it costs samples first, then everything."""
STALE_WATCH, STALE_BROKEN = 0.1, 0.5
"""Share of groups that went stale before they were trained."""
FAILED_WATCH, FAILED_BROKEN = 0.05, 0.5
"""Share of episodes given up. They enter no baseline: half lost makes groups too small."""
GRADIENT_BROKEN = 1e-8
"""Below it AdamW's own eps (1e-8) decides the step, not the data."""


_SEVERITY = (State.NORMAL, State.UNKNOWN, State.WATCH, State.BROKEN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    policy: str
    state: State
    verdict: str
    """One line."""
    findings: tuple[Finding, ...]


def diagnose(symptoms: Symptoms) -> Diagnosis:
    """Every check; the verdict is the earliest cause among the worst."""
    found = (check(symptoms) for check in CHECKS)
    findings = tuple(finding for finding in found if finding is not None)
    worst = max((finding.state for finding in findings), key=_SEVERITY.index)
    if symptoms.steps == 0 and worst is not State.BROKEN:
        verdict = f"{symptoms.policy}: no step was committed yet, there is no loss to explain"
        return Diagnosis(policy=symptoms.policy, state=State.UNKNOWN, verdict=verdict, findings=findings)
    if worst in (State.NORMAL, State.UNKNOWN):
        verdict = f"{symptoms.policy}: nothing is broken"
        if not has_critic(symptoms):
            verdict += "; a loss near 0 is what a group-relative loss is made to be"
        return Diagnosis(policy=symptoms.policy, state=State.NORMAL, verdict=verdict, findings=findings)
    cause = next(finding for finding in findings if finding.state is worst)
    verdict = f"{symptoms.policy}: {cause.name}: {cause.found}; {cause.advice}"
    return Diagnosis(policy=symptoms.policy, state=worst, verdict=verdict, findings=findings)


def diagnosis_lines(diagnosis: Diagnosis) -> list[str]:
    """For people: the verdict, then a line a finding with what is normal, and what to do where it is not."""
    lines = [f"{diagnosis.state.value.upper()}  {diagnosis.verdict}"]
    for finding in diagnosis.findings:
        lines.append(f"  {finding.name.ljust(9)} {finding.state.value.ljust(8)} {finding.found}")
        lines.append(f"  {'':18} normal: {finding.normal}")
        if finding.advice and finding.state in (State.WATCH, State.BROKEN):
            lines.append(f"  {'':18} do: {finding.advice}")
    return [harmless(line) for line in lines]


# ── the checks ──


def _run(it: Symptoms) -> Finding | None:
    if not it.failed:
        return None
    return Finding(
        name="run", state=State.BROKEN, found=f"failed: {it.failed}", normal="goes on", advice="mend that first"
    )


def _processes(it: Symptoms) -> Finding | None:
    if not it.absent:
        return None
    return Finding(
        name="processes",
        state=State.BROKEN,
        found=it.absent,
        normal="a trainer for each policy that is trained, and a rollout service",
        advice="see 'astraflow status RUN' and the logs; the launcher starts its own again after limits.hung_after_s",
    )


def _episodes(it: Symptoms) -> Finding:
    failed = sum(it.given_up.values())
    share = failed / it.episodes if it.episodes else 0.0
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(it.given_up.items(), key=lambda pair: -pair[1]))
    return Finding(
        name="episodes",
        state=above(share, FAILED_WATCH, FAILED_BROKEN) if it.episodes else State.UNKNOWN,
        found=f"{failed} of {it.episodes} given up" + (f" ({kinds})" if kinds else ""),
        normal=f"less than {FAILED_WATCH:.0%}; a failed episode is in no baseline and trains nothing",
        advice="see 'astraflow trace RUN GROUP/INDEX' of one, and docs/failures.md for its kind",
    )


def _groups(it: Symptoms) -> Finding:
    flat = sum(it.flat.values())
    share = flat / it.groups if it.groups else 0.0
    where = max(it.flat, key=lambda name: it.flat[name], default="")
    advice = {
        "lowest": "the tasks are too hard or the grader never accepts: easier tasks, more episodes a group, or a look "
        "at graded answers by 'astraflow trace'",
        "highest": "the tasks are mastered: harder ones, or leave out what is solved",
        "between": "whole groups get one reward: look at what the grader returns",
        "only": "the reward has one value for everything: look at what the grader returns",
        "alone": "group_size is 1, or all but one episode failed: a group needs two to compare",
    }
    parts = ", ".join(f"{_ALIKE[name]} {count}" for name, count in sorted(it.flat.items()) if count)
    return Finding(
        name="groups",
        state=above(share, FLAT_WATCH, FLAT_BROKEN) if it.groups >= FEW_GROUPS else State.UNKNOWN,
        found=f"{share:.0%} of the last {it.groups} without variance" + (f" ({parts})" if parts else ""),
        normal=f"less than {FLAT_WATCH:.0%}; such a group has advantage 0 and is dropped or trains nothing",
        advice=advice.get(where, ""),
    )


def _keep(it: Symptoms) -> Finding:
    left_out = sum(it.left_out.values())
    total = it.groups + left_out
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(it.left_out.items(), key=lambda pair: -pair[1]))
    why = max(it.left_out, key=lambda name: it.left_out[name], default="")
    return Finding(
        name="keep",
        state=above(left_out / total, LEFT_OUT_WATCH, LEFT_OUT_BROKEN) if total >= FEW_GROUPS else State.UNKNOWN,
        found=f"{left_out} of the last {total} groups dropped for what they are" + (f" ({reasons})" if reasons else ""),
        normal=f"less than {LEFT_OUT_WATCH:.0%}",
        advice=_UNMASK.get(why, f"look at the Keep of the recipe that says {why!r}") if why else "",
    )


def _steps(it: Symptoms) -> Finding:
    skipped = sum(it.skipped.values())
    state = State.UNKNOWN if not it.batches else State.NORMAL
    if it.skipped.get("no_signal"):
        state = State.BROKEN if skipped == it.batches else State.WATCH
    if it.skipped.get("non_finite"):
        state = State.BROKEN
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(it.skipped.items()))
    advice = {
        True: "a gradient was NaN or infinite: lower lr, look for rewards or log-probs beyond reason",
        False: "every advantage of these batches was exactly 0: keep only groups with variance (DropZeroVariance)",
    }
    return Finding(
        name="steps",
        state=state,
        found=f"{skipped} of the last {it.batches} batches made no step" + (f" ({reasons})" if reasons else ""),
        normal="none",
        advice=advice["non_finite" in it.skipped],
    )


def _gap(it: Symptoms) -> Finding:
    gap, clamped = recent(it, "logprob/gap"), recent(it, "loss/ratio_clamped")
    state = State.UNKNOWN if gap is None else above(gap, GAP_WATCH, GAP_BROKEN)
    found = "no token was sampled by the version that its step started from" if gap is None else f"{gap:.2g} nats"
    if clamped is not None and clamped > RATIO_BROKEN:
        state, found = State.BROKEN, f"{found}; {clamped:.1%} of the tokens have a ratio beyond e^20"
    return Finding(
        name="log-probs",
        state=state,
        found=found,
        normal=f"below {GAP_WATCH} between engine and trainer for the same weights (fp32: 1e-5, bf16: 0.03)",
        advice="engine and trainer disagree about the same weights: temperature, chat template, dtype, or a change of "
        "the engine's cache",
    )


def _coverage(it: Symptoms) -> Finding:
    masked = {reason: tokens for reason, tokens in it.masked_tokens.items() if reason != ON_PURPOSE}
    total = it.trained_tokens + sum(masked.values())
    share = it.trained_tokens / total if total else 1.0
    why = max(masked, key=lambda name: masked[name], default="")
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(masked.items()))
    left_out = it.masked_tokens.get(ON_PURPOSE, 0)
    return Finding(
        name="mask",
        state=below(share, COVERAGE_WATCH, COVERAGE_BROKEN) if total else State.UNKNOWN,
        found=f"{share:.0%} of {total} sampled tokens got a gradient"
        + (f" (masked: {reasons})" if reasons else "")
        + (f"; {left_out} more were not chosen, as the recipe has it" if left_out else ""),
        normal=f"more than {COVERAGE_WATCH:.0%}",
        advice=_UNMASK.get(why, f"most are masked as {why!r}"),
    )


def _staleness(it: Symptoms) -> Finding:
    total = it.groups + it.stale_groups
    share = it.stale_groups / total if total else 0.0
    mean = recent(it, "staleness/mean")
    found = f"{share:.0%} of groups went stale"
    if mean is not None:
        found = f"mean age {mean:.1f} of at most {it.max_staleness}; {found}"
    return Finding(
        name="staleness",
        state=State.UNKNOWN if not total else above(share, STALE_WATCH, STALE_BROKEN),
        found=found,
        normal=f"less than {STALE_WATCH:.0%} of groups; ages up to the bound are what asynchronous training is",
        advice="episodes take longer than max_staleness steps: raise it (with decoupled_ppo or m2po), shorten the "
        "episodes, or add rollout services",
    )


def _clip(it: Symptoms) -> Finding:
    clipped, rejected = recent(it, "loss/clip_fraction"), recent(it, "loss/weight_rejected")
    found = "the loss reports none" if clipped is None else f"{clipped:.1%} of trained tokens clipped"
    if rejected is not None:
        found = f"{found}, {rejected:.1%} rejected for their weight"
    shares = [share for share in (clipped, rejected) if share is not None]
    return Finding(
        name="clip",
        state=above(max(shares), CLIP_WATCH, CLIP_BROKEN) if shares else State.UNKNOWN,
        found=found,
        normal=f"below {CLIP_WATCH:.0%} (published runs: 0.1 % to 3 %)",
        advice="the policy moves too far from what sampled: lower lr or max_staleness, or a loss made for stale data "
        "(decoupled_ppo, m2po)",
    )


def _entropy(it: Symptoms) -> Finding:
    now = recent(it, "loss/entropy")
    first = it.series.get("loss/entropy", ())
    found = "the trainer reports none" if now is None else f"{now:.3g} nats a token, {first[0]:.3g} in the first step"
    return Finding(
        name="entropy",
        state=State.UNKNOWN if now is None else below(now, ENTROPY_WATCH, ENTROPY_BROKEN),
        found=found,
        normal=f"above {ENTROPY_WATCH}; it falls as the policy learns",
        advice="episodes of a group say the same: raise clip_high, lower lr, or stop where the score is what you want",
    )


def _update(it: Symptoms) -> Finding:
    norm, lr, loss = (recent(it, name) for name in ("step/grad_norm", "step/lr", "loss/total"))
    state, advice = State.UNKNOWN, ""
    if norm is not None and lr is not None:
        state = State.NORMAL
        if lr == 0.0:
            state, advice = State.BROKEN, "the learning rate is 0: look at lr and schedule"
        elif norm < GRADIENT_BROKEN:
            state, advice = State.BROKEN, "nothing arrives at the weights: look at the findings above, and at the loss"
    known = [
        f"{name} {value:.3g}" for name, value in (("loss", loss), ("gradient", norm), ("lr", lr)) if value is not None
    ]
    return Finding(
        name="update",
        state=state,
        found=", ".join(known) or "no step yet",
        normal="a gradient that is not 0; the loss is about as large as what the critic misjudges"
        if has_critic(it)
        else "a loss of about 0 with a gradient that is not: advantages of a group sum to 0 and the ratio is near 1",
        advice=advice,
    )


CHECKS: tuple[Callable[[Symptoms], Finding | None], ...] = (
    _episodes,
    _groups,
    _keep,
    _steps,
    _gap,
    _coverage,
    _staleness,
    *CRITIC_CHECKS,
    _clip,
    _entropy,
    _update,
    _processes,
    _run,
)
"""Causes before effects. None: there is no such thing in this run."""

_ALIKE = {
    "lowest": "all at the lowest reward",
    "highest": "all at the highest reward",
    "between": "all at one reward in between",
    "only": "all at the only reward that there ever was",
    "alone": "with nobody to compare",
}
_UNMASK = {
    "stale": "samples are older than max_staleness when they are trained: raise it, or add rollout services",
    "truncated": "replies end at max_tokens or max_turns: raise them, or keep truncated episodes",
    "failed": "their episodes failed: see the finding on episodes",
    "unscored": "the workflow gives these turns no reward: None is no gradient",
}
