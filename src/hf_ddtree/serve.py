"""`python -m hf_ddtree serve`: transformers' own OpenAI-compatible server, for one model, with a drafter beside it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

import typer
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import split_model_id

from .configuration_ddtree import DDTreeConfig
from .drafter_families import load_drafter
from .validation import check_not_paged, check_options, check_pair, check_target


class DDTreeServe(Serve):
    """
    transformers' `Serve` for one model, whose requests are decoded with trees. The constructor starts it.

    What differs from `Serve` is put on the objects of this server only, so that another one in the same process stays
    as it is.

    Args:
        model (`str`):
            The model to serve, by the name that requests use. No other is ever loaded.
        assistant_model (`str`):
            Directory or hub id of the model's DFlash drafter.
        config (`DDTreeConfig`):
            The trees of every request that does not ask for less.
        non_blocking (`bool`):
            Return once the server's thread runs, instead of when the server stops.
        options:
            The other options of `Serve`.

    Raises:
        typer.BadParameter: Continuous batching was asked for.
        ValueError: The model cannot verify trees, or the drafter is not its own.
    """

    def __init__(
        self, model: str, assistant_model: str, config: DDTreeConfig, *, non_blocking: bool = False, **options: Any
    ) -> None:
        if options.get("continuous_batching") or any(
            value is not None for name, value in options.items() if name.startswith("cb_")
        ):
            raise typer.BadParameter(
                "--continuous-batching has a cache and a decoding loop of its own, which never drafts: leave it and "
                "the --cb-* options out, or run `transformers serve` to have it without trees."
            )
        self._config = config
        self._drafter = load_drafter(assistant_model, dtype="auto")
        self._blocks = not non_blocking
        # `Serve` calls `start_server`, between loading the model and serving it, only if it is not to block itself.
        super().__init__(force_model=model, non_blocking=True, **options)

    def start_server(self) -> None:
        """Make this server's objects draft, then serve."""
        manager = self._model_manager
        for loaded in manager.loaded_models.values():
            self._attach_drafter(loaded.model)
        # `POST /reset` drops the model, and the next request loads it again.
        manager._load_model = self._attaching(manager._load_model)
        manager.load_model_and_processor = self._pinned(manager.load_model_and_processor)
        manager.load_model_streaming = self._pinned(manager.load_model_streaming)
        for handler in (self._chat_handler, self._completion_handler, self._response_handler):
            handler._build_generation_config = self._restricting(handler._build_generation_config)
        if self._blocks:
            self.server.run()
        else:
            super().start_server()

    def _attach_drafter(self, model: Any) -> None:
        drafter = self._drafter.to(device=model.device, dtype=model.dtype)
        check_target(model)
        check_pair(model, drafter)
        model.generation_config.ddtree = self._config
        model.generate = functools.partial(model.generate, assistant_model=drafter)

    def _attaching(self, load_model: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load_model)
        def load_and_attach(*args: Any, **kwargs: Any) -> Any:
            model = load_model(*args, **kwargs)
            self._attach_drafter(model)
            return model

        return load_and_attach

    def _pinned(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """`load` for the served model only: `force_model` binds text requests, and not `POST /load_model`, say."""
        from fastapi import HTTPException

        manager = self._model_manager
        repo, served_gguf_file = split_model_id(manager.force_model)
        served = manager.process_model_name(repo)

        @functools.wraps(load)
        def pinned(name: str, *args: Any, **kwargs: Any) -> Any:
            if (name, kwargs.get("gguf_file")) != (served, served_gguf_file):
                raise HTTPException(400, f"Server is pinned to '{manager.force_model}'; requested '{name}'.")
            return load(name, *args, **kwargs)

        return pinned

    def _restricting(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """A request's generation config as `build` makes it, with trees that the server allows, or status 400."""
        from fastapi import HTTPException

        @functools.wraps(build)
        def build_generation_config(*args: Any, **kwargs: Any) -> Any:
            generation_config = build(*args, **kwargs)
            try:
                config = requested_config(generation_config.ddtree, self._config, self._drafter.device.type)
                if config is not None:
                    check_not_paged(generation_config.cache_implementation)
                    check_options(generation_config, generation_config.get_generation_mode(self._drafter))
            except (TypeError, ValueError) as error:
                off = '`"ddtree": false` in the request\'s `generation_config` switches trees off.'
                raise HTTPException(400, f"{error} {off}") from error
            generation_config.ddtree = False if config is None else config
            return generation_config

        return build_generation_config


def requested_config(asked: Any, served: DDTreeConfig, device_type: str) -> DDTreeConfig | None:
    """The trees of a request, `None` for none.

    Args:
        asked: The request's `ddtree`: nothing (`None`) or `True` for the server's own, `False` for none, or a dict
            that may lower the budget.
        served: The server's trees.
        device_type: The device that `budget="auto"` is resolved for.

    Raises:
        TypeError, ValueError: It is no valid value of `ddtree`, or asks for more or other trees than the server's.
    """
    if asked is None or asked is True:
        return served
    config = DDTreeConfig.from_value({**served.to_dict(), **asked} if isinstance(asked, Mapping) else asked)
    if config is None:
        return None
    if replace(config, budget=served.budget) != served:
        raise ValueError(f"ddtree: a request may lower `budget` and change nothing else, got {asked!r}.")
    if isinstance(config.budget, tuple):
        raise ValueError(f"ddtree: a request's `budget` is one number, got {asked!r}.")
    most = max(served.sizes(device_type))
    if max(config.sizes(device_type)) > most:
        raise ValueError(f"ddtree: this server's `budget` is {most}, and a request may only lower it, got {asked!r}.")
    return config


def _with_options_of_serve(command: Callable[..., None]) -> Callable[..., None]:
    """Show typer the options of `transformers serve` in place of `**options`."""
    ours = inspect.signature(command, eval_str=True).parameters
    taken = ("force_model", "non_blocking")
    stock = [p for p in inspect.signature(Serve).parameters.values() if p.name not in taken]
    kept = [p for p in ours.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = inspect.Signature([*kept, *stock])  # type: ignore[attr-defined]
    return command


@_with_options_of_serve
def serve(
    model: Annotated[str, typer.Argument(help="Model to serve, as in `transformers serve`. Requests get no other.")],
    assistant_model: Annotated[str, typer.Option(help="The model's DFlash drafter, a directory or hub id.")],
    budget: Annotated[str, typer.Option(help='Nodes of a tree, or "auto". A request may lower it.')] = "auto",
    tree: Annotated[str, typer.Option(help="best_first, chain or static.")] = "best_first",
    **options: Any,
) -> None:
    """Serve a model with draft trees behind transformers' OpenAI-compatible API.

    Takes the options of `transformers serve`, except that continuous batching is refused.
    """
    try:
        config = DDTreeConfig.from_dict({"budget": int(budget) if budget.isdecimal() else budget, "tree": tree})
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    DDTreeServe(model, assistant_model, config, **options)
