"""`python -m hf_ddtree serve` and the real `openai` client, beside transformers' own server without trees."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import CompileConfig, PreTrainedModel
from transformers.cli.serve import Serve
from typer.testing import CliRunner

from hf_ddtree import DDTreeConfig
from hf_ddtree.__main__ import app
from hf_ddtree.serve import DDTreeServe, requested_config
from scripted import scripted, tiny_drafter, tiny_target, word_tokenizer

openai = pytest.importorskip("openai", reason="needs hf-ddtree[serving]")
pytest.importorskip("fastapi", reason="needs hf-ddtree[serving]")
pytest.importorskip("uvicorn", reason="needs hf-ddtree[serving]")

PROMPT = "w1 w2 w3"
NEW = 40
BUDGET = 31


@dataclass
class Running:
    """A server in a thread of this process, and a client of it."""

    server: Serve
    name: str

    def __post_init__(self) -> None:
        while not self.server.server.started:
            self.server._thread.join(0.01)
            assert self.server._thread.is_alive(), "the server did not start"
        port = self.server.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://localhost:{port}"
        self.client = self.new_client()

    def new_client(self) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=None)

    @property
    def model(self) -> PreTrainedModel:
        (loaded,) = self.server._model_manager.loaded_models.values()
        return loaded.model

    @contextlib.contextmanager
    def forwards(self) -> Iterator[list[int]]:
        """The number of rows of each forward of the target, seen from outside the package."""
        rows: list[int] = []
        handle = self.model.model.layers[0].register_forward_hook(lambda _, args, __: rows.append(args[0].shape[1]))
        yield rows
        handle.remove()

    def ask(self, endpoint: str = "completions", *, stream: bool = False, prompt: str = PROMPT, **options: Any) -> Any:
        """Everything of an answer that a client sees: pieces of text, finish reason, usage."""
        options = {"max_tokens": NEW, "model": self.name} | options
        client = options.pop("client", self.client)
        if (config := options.pop("generation_config", None)) is not None:
            options["extra_body"] = {"generation_config": json.dumps({"max_new_tokens": NEW} | config)}
        if endpoint == "responses":
            options["max_output_tokens"] = options.pop("max_tokens")
            answer = client.responses.create(input=prompt, stream=False, **options)
            return [answer.output_text], answer.status, answer.usage.model_dump()
        if endpoint == "chat":
            messages = [{"role": "user", "content": prompt}]
            answer = client.chat.completions.create(messages=messages, stream=stream, **options)
            text = (lambda c: c.delta.content) if stream else (lambda c: c.message.content)
        else:
            answer = client.completions.create(prompt=prompt, stream=stream, **options)
            text = lambda c: c.text  # noqa: E731
        parts = list(answer) if stream else [answer]
        last = parts[-1]
        usage = (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens)
        return [text(part.choices[0]) for part in parts], last.choices[0].finish_reason, usage

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@contextlib.contextmanager
def running(server: Serve, name: str) -> Iterator[Running]:
    try:
        started = Running(server, name)
        yield started
        started.client.close()
    finally:
        server.kill_server()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target with its tokenizer, and a drafter, on disk."""
    target = tiny_target("llama")
    model, drafter = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("drafter")
    target.save_pretrained(model)
    word_tokenizer().save_pretrained(model)
    tiny_drafter(target).save_pretrained(drafter)
    return str(model), str(drafter)


OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "port": 0, "non_blocking": True}


@pytest.fixture(scope="module")
def trees(paths: tuple[str, str]) -> Iterator[Running]:
    model, drafter = paths
    with running(DDTreeServe(model, drafter, DDTreeConfig(budget=BUDGET), **OPTIONS), model) as started:
        yield started


@pytest.fixture(scope="module")
def plain(paths: tuple[str, str], trees: Running) -> Iterator[Running]:
    """transformers' own server, started after the other in the same process, which must leave it alone."""
    with running(Serve(paths[0], **OPTIONS), paths[0]) as started:
        yield started


@pytest.fixture(scope="module")
def text(paths: tuple[str, str]) -> list[int]:
    """The ids of the prompt and of what the target says to it."""
    ids = word_tokenizer()(PROMPT, return_tensors="pt").input_ids
    return tiny_target("llama").generate(ids, max_new_tokens=NEW, do_sample=False)[0].tolist()


@pytest.fixture
def strong(text: list[int]) -> Iterator[None]:
    """A drafter that knows what the target says to the prompt, most of the time."""
    with scripted(text, 0.8):
        yield


# -- the same answers ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("strong")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
class TestSameAnswers:
    def test_few_forwards(self, trees: Running, plain: Running, endpoint: str, stream: bool) -> None:
        with plain.forwards() as one_by_one:
            expected = plain.ask(endpoint, stream=stream)
        with trees.forwards() as rows:
            assert trees.ask(endpoint, stream=stream) == expected
        assert expected[1:] == ("length", (3, NEW, 3 + NEW))
        assert len(one_by_one) == NEW
        assert len(rows) <= NEW / 2
        assert max(rows) == BUDGET + 1
        if stream:
            assert len(expected[0]) > NEW / 2

    @pytest.mark.parametrize("where", [5, 6, 7, 8, 30])
    def test_stop_strings(
        self, trees: Running, plain: Running, text: list[int], endpoint: str, stream: bool, where: int
    ) -> None:
        stop = ["nothing", word_tokenizer().decode(text[where])]
        expected = plain.ask(endpoint, stream=stream, stop=stop)
        assert trees.ask(endpoint, stream=stream, stop=stop) == expected
        assert expected[1] == "stop"
        assert expected[2][1] <= where - 2

    def test_an_end_token(self, trees: Running, plain: Running, text: list[int], endpoint: str, stream: bool) -> None:
        config = {"eos_token_id": text[20]}
        expected = plain.ask(endpoint, stream=stream, generation_config=config)
        assert trees.ask(endpoint, stream=stream, generation_config=config) == expected
        assert expected[1] == "stop"

    def test_penalties(self, trees: Running, plain: Running, endpoint: str, stream: bool) -> None:
        expected = plain.ask(endpoint, stream=stream, frequency_penalty=0.5)
        assert expected != plain.ask(endpoint, stream=stream)
        assert trees.ask(endpoint, stream=stream, frequency_penalty=0.5) == expected

    def test_sampling(self, trees: Running, plain: Running, endpoint: str, stream: bool) -> None:
        options: dict[str, Any] = {"seed": 7, "temperature": 1.5, "generation_config": {"do_sample": True}}
        expected = plain.ask(endpoint, stream=stream, **options)
        assert expected != plain.ask(endpoint, stream=stream)
        with trees.forwards() as rows:
            assert trees.ask(endpoint, stream=stream, **options) == expected
        assert max(rows) == BUDGET + 1


def test_the_responses_endpoint(trees: Running, plain: Running, strong: None) -> None:
    expected = plain.ask("responses")
    with trees.forwards() as rows:
        assert trees.ask("responses") == expected
    assert len(rows) <= NEW / 2


def test_several_clients_at_once(trees: Running, plain: Running, strong: None) -> None:
    cases: list[dict[str, Any]] = [
        {"endpoint": endpoint, "stream": stream, "prompt": prompt, "generation_config": config}
        for prompt in (PROMPT, "w9 w8 w7 w6")
        for endpoint in ("completions", "chat")
        for stream in (False, True)
        for config in (None, {"ddtree": False})
    ]
    expected = [plain.ask(**case | {"generation_config": None}) for case in cases]
    clients = [trees.new_client() for _ in cases]
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(lambda client, case: trees.ask(client=client, **case), clients, cases))
    for client in clients:
        client.close()
    assert answers == expected


def test_a_client_that_leaves(trees: Running, plain: Running, strong: None) -> None:
    expected = plain.ask()
    with trees.client.completions.create(model=trees.name, prompt=PROMPT, max_tokens=600, stream=True) as stream:
        assert next(iter(stream)).choices[0].text
    assert trees.ask() == expected


# -- what a request may change ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_trees_off(trees: Running, plain: Running, strong: None, stream: bool) -> None:
    expected = plain.ask(stream=stream)
    with trees.forwards() as rows:
        assert trees.ask(stream=stream, generation_config={"ddtree": False}) == expected
    assert rows == [3] + [1] * (NEW - 1)


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({}, BUDGET),
        ({"ddtree": None}, BUDGET),
        ({"ddtree": True}, BUDGET),
        ({"ddtree": {}}, BUDGET),
        ({"ddtree": {"budget": BUDGET}}, BUDGET),
        ({"ddtree": {"budget": 15}}, 15),
        ({"ddtree": DDTreeConfig(budget=15).to_dict()}, 15),
    ],
)
def test_the_budget_lowered(trees: Running, plain: Running, strong: None, config: Any, most: int) -> None:
    expected = plain.ask()
    with trees.forwards() as rows:
        assert trees.ask(generation_config=config) == expected
    assert max(rows) == most + 1
    assert len(rows) <= NEW / 2


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ddtree": {"budget": BUDGET + 1}}, f"`budget` is {BUDGET}, and a request may only lower it"),
    ({"ddtree": {"budget": -1}}, "between 0 and 1024"),
    ({"ddtree": {"budget": [15, 7]}}, "is one number"),
    ({"ddtree": {"budget": "large"}}, 'an int, "auto"'),
    ({"ddtree": {"tree": "chain"}}, "change nothing else"),
    ({"ddtree": {"max_depth": 2}}, "change nothing else"),
    ({"ddtree": {"budget": 7, "record_trees": True}}, "change nothing else"),
    ({"ddtree": {"record_times": True}}, "change nothing else"),
    ({"ddtree": {"nodes": 3}}, "unknown option nodes"),
    ({"ddtree": 7}, "must be True, False"),
    ({"ddtree": "no"}, "must be True, False"),
    ({"num_beams": 2}, "num_beams"),
    ({"use_cache": False}, "use_cache"),
    ({"cache_implementation": "paged"}, "paged"),
    ({"speculation_type": "dflash"}, "speculation_type"),
]


@pytest.mark.parametrize(("config", "match"), REFUSED)
def test_anything_else_is_refused(trees: Running, config: dict[str, Any], match: str) -> None:
    with trees.forwards() as rows, pytest.raises(openai.BadRequestError) as caught:
        trees.ask(generation_config=config)
    assert match in caught.value.body["detail"]
    assert '"ddtree": false' in caught.value.body["detail"]
    assert not rows


@pytest.mark.parametrize(
    ("endpoint", "stream"), [("completions", True), ("chat", False), ("chat", True), ("responses", False)]
)
def test_every_endpoint_refuses(trees: Running, endpoint: str, stream: bool) -> None:
    with trees.forwards() as rows, pytest.raises(openai.BadRequestError) as caught:
        trees.ask(endpoint, stream=stream, generation_config={"ddtree": {"budget": 1000}})
    assert "may only lower it" in caught.value.body["detail"]
    assert not rows


def test_what_trees_cannot_do_works_with_trees_off(trees: Running, plain: Running) -> None:
    expected = plain.ask(generation_config={"num_beams": 2})
    assert trees.ask(generation_config={"num_beams": 2, "ddtree": False}) == expected


def test_auto_is_compared_by_what_it_means() -> None:
    assert requested_config({"budget": 7}, DDTreeConfig(), "cpu") == DDTreeConfig(budget=7)
    assert requested_config({"budget": 63}, DDTreeConfig(), "cuda") == DDTreeConfig(budget=63)
    with pytest.raises(ValueError, match="`budget` is 7"):
        requested_config({"budget": 8}, DDTreeConfig(), "cpu")
    with pytest.raises(ValueError, match="`budget` is 3"):
        requested_config({"budget": "auto"}, DDTreeConfig(budget=3), "cpu")


# -- one model -------------------------------------------------------------------------------------------------------


def test_no_other_model_is_loaded(trees: Running, paths: tuple[str, str], tmp_path: Path) -> None:
    other = str(tmp_path)
    tiny_target("llama", seed=1).save_pretrained(other)
    word_tokenizer().save_pretrained(other)
    served = trees.model
    for endpoint in ("completions", "chat", "responses"):
        with pytest.raises(openai.BadRequestError) as caught:
            trees.ask(endpoint, model=other)
        assert "pinned" in caught.value.body["detail"]
    status, answer = trees.post("/load_model", {"model": other})
    assert status == 400 and "pinned" in answer
    assert trees.model is served
    status, answer = trees.post("/load_model", {"model": paths[0]})
    assert status == 200 and '"ready"' in answer


def test_a_model_loaded_again_drafts(trees: Running, plain: Running, strong: None) -> None:
    first = trees.model
    assert trees.post("/reset", {})[0] == 200
    expected = plain.ask()
    assert trees.ask() == expected
    assert trees.model is not first
    with trees.forwards() as rows:
        assert trees.ask() == expected
    assert len(rows) <= NEW / 2


def test_a_drafter_of_another_model_is_refused_at_the_start(paths: tuple[str, str], tmp_path: Path) -> None:
    tiny_drafter(tiny_target("llama", hidden_size=64)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="hidden size is 64"):
        DDTreeServe(paths[0], str(tmp_path), DDTreeConfig(), **OPTIONS)


def test_a_server_that_compiles(paths: tuple[str, str], plain: Running, strong: None) -> None:
    """Requests with and without trees share a model; compiled on a CPU, which transformers does when told to."""
    expected = plain.ask()
    with running(DDTreeServe(*paths, DDTreeConfig(budget=15), compile=True, **OPTIONS), paths[0]) as started:
        compile_config = CompileConfig(backend="eager", fullgraph=False)
        compile_config._compile_all_devices = True
        started.model.generation_config.compile_config = compile_config
        for _ in range(2):
            with started.forwards() as rows:
                assert started.ask() == expected
            assert len(rows) <= NEW / 2
            assert started.ask(generation_config={"ddtree": False}) == expected
        assert started.model.__dict__.get("_compiled_call") is not None


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [["--continuous-batching"], ["--cb-block-size", "16"]])
def test_continuous_batching_is_refused_before_anything_loads(options: list[str]) -> None:
    result = CliRunner().invoke(app, ["serve", "no/model", "--assistant-model", "no/drafter", *options])
    assert result.exit_code == 2
    assert "--continuous-batching" in result.output


@pytest.mark.parametrize(
    ("options", "match"),
    [(["--budget", "1025"], "budget"), (["--budget", "x"], "budget"), (["--tree", "bush"], "tree")],
)
def test_bad_options_are_refused_before_anything_loads(options: list[str], match: str) -> None:
    result = CliRunner().invoke(app, ["serve", "no/model", "--assistant-model", "no/drafter", *options])
    assert result.exit_code == 2
    assert f"`{match}`" in result.output


def test_the_command(paths: tuple[str, str], plain: Running) -> None:
    model, drafter = paths
    command = [sys.executable, "-m", "hf_ddtree", "serve", model, "--assistant-model", drafter, "--budget", "7"]
    options = ["--tree", "static", "--port", "0", "--device", "cpu", "--dtype", "float32"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"running on (http://localhost:\d+)", line):
                break
        else:
            raise AssertionError("the server did not start")
        with openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none", max_retries=0, timeout=None) as client:
            assert plain.ask(client=client) == plain.ask()
            for config, match in (({"budget": 8}, "`budget` is 7"), ({"tree": "best_first"}, "change nothing else")):
                with pytest.raises(openai.BadRequestError) as caught:
                    plain.ask(client=client, generation_config={"ddtree": config})
                assert match in caught.value.body["detail"]
    finally:
        process.terminate()
        process.communicate()
