"""Plans which values a gradient keeps and which it recomputes, to fit a memory budget."""

from tracegrad.planning.plan import RecomputePlan as RecomputePlan
from tracegrad.planning.plan_recompute import plan_recompute as plan_recompute
from tracegrad.planning.plan_recompute import recompute_to_fit as recompute_to_fit
from tracegrad.planning.search import BudgetTooSmall as BudgetTooSmall
from tracegrad.planning.whole_step import BudgetWarning as BudgetWarning
