"""Draft trees from block diffusion inside stock `generate`: `model.generate(assistant_model=drafter, ddtree=True)`."""

from .candidate_generator import DDTreeCandidateGenerator
from .configuration_ddtree import DDTreeConfig
from .configuration_dflash import DFlashConfig
from .draft_tree import DraftTree
from .install import install, uninstall
from .modeling_dflash import DFlashDraftModel
from .outputs import DDTreeStats, GenerateDDTreeOutput
from .target_state import release_buffers

__version__ = "0.1.0"

__all__ = [
    "DDTreeCandidateGenerator",
    "DDTreeConfig",
    "DDTreeStats",
    "DFlashConfig",
    "DFlashDraftModel",
    "DraftTree",
    "GenerateDDTreeOutput",
    "install",
    "release_buffers",
    "uninstall",
]

install()
