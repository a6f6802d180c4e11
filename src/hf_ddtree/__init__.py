"""Draft trees from block diffusion inside stock `generate`: `model.generate(assistant_model=drafter, ddtree=True)`."""

from .candidate_generator import DDTreeCandidateGenerator
from .configuration_ddtree import DDTreeConfig
from .configuration_dflash import DFlashConfig
from .draft_source import DraftSource, Prefixes, Proposal, add_children
from .draft_tree import DraftTree
from .drafter_families import DrafterFamily, register_family
from .install import install, uninstall
from .modeling_dflash import DFlashDraftModel
from .outputs import DDTreeStats, GenerateDDTreeOutput
from .target_state import release_buffers
from .tree_policy import TreePolicy, register_policy

__version__ = "0.1.0"

__all__ = [
    "DDTreeCandidateGenerator",
    "DDTreeConfig",
    "DDTreeStats",
    "DFlashConfig",
    "DFlashDraftModel",
    "DraftSource",
    "DraftTree",
    "DrafterFamily",
    "GenerateDDTreeOutput",
    "Prefixes",
    "Proposal",
    "TreePolicy",
    "add_children",
    "install",
    "register_family",
    "register_policy",
    "release_buffers",
    "uninstall",
]

install()
