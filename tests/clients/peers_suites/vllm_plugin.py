"""A pytest plugin for vLLM's own tests: models of the Hub are the folders that run.py names, and nothing is fetched.

It runs in the tests' environment, where vLLM's Python files can be imported and minivllm cannot. The servers are
started by `vllm serve`, an executable that run.py puts on PATH.
"""

import os
import re

import outcomes
import pytest

SERVER = re.compile(r"\bRemote\w*Server\b")
EMBEDDERS = ("e5", "bge", "gte", "embed", "minilm", "arctic", "rerank")


def folder_for(name):
    """Of the model's tokenizer and config: vllm_server.py serves the same."""
    if os.path.isdir(str(name)):
        return name
    is_embedder = any(part in str(name).lower() for part in EMBEDDERS)
    return os.environ["PEERS_EMBEDDER" if is_embedder else "PEERS_TOKENIZER"]


def pytest_ignore_collect(collection_path):
    """Files that start no server, themselves or by their folder's fixtures: they test vLLM's classes."""
    if collection_path.suffix == ".py" and collection_path.name != "conftest.py":
        both = (collection_path, collection_path.with_name("conftest.py"))
        if not any(SERVER.search(path.read_text()) for path in both if path.exists()):
            return True
    return None


def pytest_configure(config):
    import huggingface_hub
    import sentence_transformers
    import transformers
    import vllm.tokenizers
    from tests.utils import RemoteVLLMServer

    outcomes.count_starts(RemoteVLLMServer, "__init__")
    RemoteVLLMServer._pre_download_model = lambda self, model, args: None
    RemoteVLLMServer._get_process_termination_timeout = lambda self: 15.0
    huggingface_hub.HfApi.snapshot_download = lambda self, *args, **named: os.environ["PEERS_ADAPTER"]
    for loader in (transformers.AutoTokenizer, transformers.AutoConfig):
        use_folders(loader, "from_pretrained")
    for kind, folder in (
        (sentence_transformers.SentenceTransformer, folder_for),
        (sentence_transformers.CrossEncoder, lambda _: os.environ["PEERS_CROSS_ENCODER"]),
    ):
        replace_folder(kind, folder)
    get_tokenizer = vllm.tokenizers.get_tokenizer

    def get(tokenizer_name, *args, **named):
        return get_tokenizer(folder_for(tokenizer_name), *args, **named)

    vllm.tokenizers.get_tokenizer = get


def pytest_runtest_setup(item):
    """Ended by hand: where a wrong file is a 400 it fails and leaves a task that fills the memory with errors."""
    if item.name.startswith("test_loading_invalid_adapters_does_not_break_others"):
        pytest.fail("files that are wrong are no 500 here")


def replace_folder(kind, folder_of):
    load = kind.__init__
    kind.__init__ = lambda self, name, *args, **named: load(self, folder_of(name), *args, **named)


def use_folders(loader, method):
    original = getattr(loader, method)
    setattr(loader, method, lambda name, *args, **named: original(folder_for(name), *args, **named))
