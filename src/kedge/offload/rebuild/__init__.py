"""What need not be kept, because what is kept in any case determines it: exactly, to the last bit."""

from kedge.offload.rebuild.recipe import Recipe
from kedge.offload.rebuild.rules import RULES, find

__all__ = ["RULES", "Recipe", "find"]
