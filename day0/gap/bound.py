"""Reads from our classes which operators they call, so that no list of it can go stale; runs none of them."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap

from torch import nn

from day0_kernels import registry
from llm_svc.adopt import packed_product
from llm_svc.adopt.experts import experts_forward
from llm_svc.adopt.families import Family


def bound_classes(family: Family) -> dict[str, tuple[str, ...]]:
    """For each of upstream's class names that the family replaces: the operators that our class calls."""
    return {name: operators_called(cls) for name, cls in family.classes.items()}


def operators_called(cls: type[nn.Module]) -> tuple[str, ...]:
    """Operators that the methods of a class call through the forward context, and the module's functions they use."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    module = sys.modules[cls.__module__]
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found = _attributes(tree)
    for name in sorted(named):
        function = getattr(module, name, None)
        if inspect.isfunction(function) and function.__module__ == cls.__module__:
            found |= _attributes(ast.parse(textwrap.dedent(inspect.getsource(function))))
    return tuple(sorted(found))


def float_expert_operators() -> tuple[str, ...]:
    """Those of experts in the dtype of the model."""
    experts = sys.modules[experts_forward.__module__]
    return tuple(sorted(name for name in _attributes(ast.parse(inspect.getsource(experts)))))


def packed_expert_operators() -> tuple[str, ...]:
    """Those of experts that stay in MXFP4."""
    return tuple(sorted(_attributes(ast.parse(inspect.getsource(packed_product)))))


def _attributes(tree: ast.AST) -> set[str]:
    """Names of operators taken from something called `operators` or `_operators`."""
    known = {declared.name for declared in registry.operators()}
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr not in known:
            continue
        owner = node.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if name.lstrip("_") == "operators":
            found.add(node.attr)
    return found
