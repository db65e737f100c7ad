"""Attention under the one mask rule: the rule, the plan, the engines and the plug-in for transformers."""

from torchtrain.attention.engines.choice import ENGINES, attend, resolve_engine
from torchtrain.attention.plan import AttentionPlan, make_plan
from torchtrain.attention.rule import visible_BTT

__all__ = ["ENGINES", "AttentionPlan", "attend", "make_plan", "resolve_engine", "visible_BTT"]
