"""Pictures of draft trees (text, SVG, Graphviz) and of a whole generation (one HTML page)."""

from .page import generation_html
from .trees import tree_dot, tree_svg, tree_text

__all__ = ["generation_html", "tree_dot", "tree_svg", "tree_text"]
