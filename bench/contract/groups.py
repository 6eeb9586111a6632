"""The plan of one local SGD group: a layout of its own, and its share of each batch."""

from dataclasses import replace

from bench.contract import plan as plans
from bench.contract.plan import Command, Plan
from bench.contract.plan_kinds import TrainingPlan


def of_group(plan: TrainingPlan) -> TrainingPlan:
    """Return the plan of one group, which trains on its share of each batch; a plan without groups is unchanged.

    A group has whole nodes, or an equal share of the ranks of one node.
    """
    groups = plan.world.groups
    if groups is None:
        return plan
    num_ranks, size = plan.world.num_ranks // groups, plan.batch.global_batch_size // groups
    nodes = max(1, plan.world.num_nodes // groups)
    world = replace(plan.world, num_nodes=nodes, ranks_per_node=num_ranks // nodes, num_ranks=num_ranks, groups=None)
    tokens = plan.batch.tokens_per_step // groups
    return replace(plan, world=world, batch=replace(plan.batch, global_batch_size=size, tokens_per_step=tokens))


def restarts(plan: Plan, command: Command) -> list[range]:
    """Return the ranks of each group of a trial that may be restarted, once for each restart that is allowed."""
    groups, recipe = plan.world.groups, plan.config.recipe
    local_sgd = recipe.averaging if recipe else None
    if not groups or local_sgd is None or not local_sgd.restarts or command not in plans.trial_commands(plan):
        return []
    size = plan.world.num_ranks // groups
    return [range(group * size, (group + 1) * size) for group in range(1, groups) for _ in range(local_sgd.restarts)]


def needed_ranks(plan: Plan, command: Command) -> range:
    """Return the ranks that must succeed: all ranks of a command, but only those of group 0 in a trial of local SGD.

    Group 0 keeps the log, which records when another group left.
    """
    groups = plan.world.groups if command in plans.trial_commands(plan) else None
    return range(plan.world.num_ranks // (groups or 1))
