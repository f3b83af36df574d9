"""A planner writes a plan, a solver follows it: both are paid for the answer alone, as one team."""

from __future__ import annotations

from astraflow.rollout.workflow import Agents, Reward
from astraflow.types import Task
from astraflow.workflows.single_turn import Ask, Grade, prompt_of
from astraflow.workflows.truth import Truth, question_of, user

PLAN = "{question}\n\nDo not answer yet: write a short plan of how to find the answer."
SOLVE = "{question}\n\nPlan:\n{plan}\n\nFollow the plan and answer."


class PlanAndSolve:
    """Roles ``planner`` and ``solver``. Each is compared with its own role: which of them helped, the group tells."""

    def __init__(self, grade: Grade, *, ask: Ask = prompt_of, plan: str = PLAN, solve: str = SOLVE) -> None:
        """``plan`` is filled with question, ``solve`` with question and plan."""
        self._truth = Truth(grade)
        self._ask = ask
        self._plan = plan
        self._solve = solve

    async def __call__(self, task: Task, agents: Agents) -> Reward:
        question = question_of(self._ask, task)
        plan = await agents["planner"].chat([user(self._plan.format(question=question))])
        answer = await agents["solver"].chat([user(self._solve.format(question=question, plan=plan.text))])
        grade = await self._truth.of(answer.text, task)
        return Reward(grade, turns=dict.fromkeys((plan.turn, answer.turn), grade))
