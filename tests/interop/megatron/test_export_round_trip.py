"""import(export(plan)) is the plan, but for the fields that the table of the export names."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron_exports import changes_on_the_way, published_plans, recipe_plans
from random_plans import moe_plans, random_fields

from threefold.interop.megatron.export_plan import FORMATS
from threefold.plan.parse import parse
from threefold.plan.plan import Plan

PLANS = {**recipe_plans(), **published_plans()}
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]
random_plans = st.one_of(random_fields().map(lambda fields: parse(fields).plan).filter(bool), moe_plans())


def check_both_ways(plan: Plan) -> None:
    for to in FORMATS:
        assert changes_on_the_way(plan, to) == {}


@pytest.mark.parametrize("name", PLANS)
def test_recipes_and_published_runs_come_back(name: str) -> None:
    check_both_ways(PLANS[name])


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(random_plans)
def test_random_plans_come_back(plan: Plan) -> None:
    check_both_ways(plan)


@pytest.mark.slow
@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(random_plans)
def test_five_hundred_random_plans_come_back(plan: Plan) -> None:
    check_both_ways(plan)
