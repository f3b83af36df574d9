"""Which task next, and how many episodes of it? One file a way of choosing.

    Shuffled, Uniform     every task once an epoch; independent draws         shuffled.py
    Stages, Mixture       one after the other; by weights or sizes            compose.py
    Greso                 seldom what had no signal of late                   greso.py
    Dots, Prioritised     what is neither easy nor hard; what is not solved   dots.py, prioritised.py
    FilterSolved          nothing that is solved, but for a probe             filter_solved.py
    Less                  what moves the weights as held-out tasks would      less.py
    WithOlderVersions     (around another) older versions sample some turns   older_versions.py
    OverSampled           (a Pace) as many groups as a full batch will take   over_sampled.py

Those that learn know of a task by its place in the source, ignore groups of others' tasks, and begin anew with other
tasks. Every draw depends on the seed and on how many there were before, on nothing else.
"""

from astraflow.algorithms.curate.compose import Mixture, Stage, Stages, most_groups
from astraflow.algorithms.curate.dots import Dots
from astraflow.algorithms.curate.filter_solved import FilterSolved
from astraflow.algorithms.curate.greso import Greso
from astraflow.algorithms.curate.less import Less
from astraflow.algorithms.curate.older_versions import WithOlderVersions
from astraflow.algorithms.curate.over_sampled import OverSampled
from astraflow.algorithms.curate.prioritised import Prioritised
from astraflow.algorithms.curate.shuffled import SUPERVISED, Shuffled, Uniform

__all__ = [
    "SUPERVISED",
    "Dots",
    "FilterSolved",
    "Greso",
    "Less",
    "Mixture",
    "OverSampled",
    "Prioritised",
    "Shuffled",
    "Stage",
    "Stages",
    "Uniform",
    "WithOlderVersions",
    "most_groups",
]
