"""JSON that fits a schema: a grammar as logits processor, with trees.

    python examples/structured_output.py "Invent a person."

The processor sees what it would see without trees: each token's own prefix, once and in order. So a grammar that keeps
a state works, and the text is the one that plain `generate` writes under the same grammar. xgrammar makes the grammar
(`pip install --no-deps xgrammar` and `pip install apache-tvm-ffi`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch
import xgrammar
from xgrammar.contrib.hf import LogitsProcessor

from pair import add_pair_options, load_pair

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "occupation": {"enum": ["farmer", "teacher", "engineer", "nurse", "musician"]},
    },
    "required": ["name", "age", "occupation"],
    "additionalProperties": False,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="Invent a person. Answer in JSON with name, age and occupation.")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    add_pair_options(parser)
    args = parser.parse_args(argv)
    model, tokenizer, drafter = load_pair(args.target, args.drafter, args.dtype)

    # The logits may have more columns than the tokenizer has tokens.
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.get_output_embeddings().weight.shape[0])
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)

    chat = [{"role": "user", "content": args.prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    inputs = inputs.to(model.device)
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False, "return_dict_in_generate": True}

    # A grammar's processor follows one text: a new one for each call.
    out = model.generate(
        **inputs, **options, logits_processor=[LogitsProcessor(grammar)], assistant_model=drafter, ddtree=True
    )
    plain = model.generate(**inputs, **options, logits_processor=[LogitsProcessor(grammar)])
    text = tokenizer.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(json.dumps(json.loads(text), indent=2))
    print(f"{out.ddtree_stats.mean_acceptance_length:.2f} tokens per round")
    print("the same text as without trees" if torch.equal(out.sequences, plain.sequences) else "another text")


if __name__ == "__main__":
    main()
