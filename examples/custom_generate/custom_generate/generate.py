"""`ddtree` as a `custom_generate` folder: the call goes to the installed hf_ddtree, all its arguments as they came."""

from __future__ import annotations

from typing import Any

import hf_ddtree


def generate(*args: Any, model: Any, ddtree: Any = True, **kwargs: Any) -> Any:
    """
    Args:
        model: The target, as transformers passes it.
        ddtree: `True`, a dict of options or a `DDTreeConfig`.
        args, kwargs: Those of `generate`, the drafter as `assistant_model` among them.

    Returns:
        What `model.generate(..., ddtree=ddtree)` returns.
    """
    hf_ddtree.install()  # the import did, unless the hooks have been taken out since
    # By the class: a model loaded from a repository with this folder has this very function as its `generate`.
    return type(model).generate(model, *args, ddtree=ddtree, **kwargs)
