"""`python -m hf_ddtree`: the command line, one subcommand a module."""

from __future__ import annotations

import typer

from .inspection import inspect_checkpoint
from .serve import serve

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(serve)
app.command("inspect")(inspect_checkpoint)


@app.callback()
def main() -> None:
    """Draft trees for Hugging Face transformers."""


if __name__ == "__main__":
    app(prog_name="python -m hf_ddtree")
