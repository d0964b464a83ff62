"""One vLLM engine behind a pipe, for the demo: one JSON object per line in, one per line out.

It runs in a process of its own and is the only module of the server's package that uses vLLM.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def make_model(directory: str, config: dict[str, Any]) -> dict[str, Any]:
    """Write a Llama of the given shape with random but reproducible float32 weights.

    Its tokenizer's words are the numbers of the tokens: "5 17" is tokenized to 5 and 17.
    """
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    # A wide range: with the default one all tokens behave alike, and equal answers prove little.
    model = LlamaForCausalLM(LlamaConfig(**config, initializer_range=0.1))
    model.save_pretrained(directory)
    known = {"<unk>": 0} | {str(token): token for token in range(1, config["vocab_size"])}
    words = Tokenizer(WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(directory)
    return {"parameters": model.num_parameters()}


def convert(gguf: str, directory: str) -> dict[str, Any]:
    """Write the model in the file `gguf` to `directory` in bfloat16, with its tokenizer, as vLLM reads it."""
    import torch
    import transformers

    folder, file = os.path.split(gguf)
    arguments: dict[str, Any] = {"gguf_file": file, "dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):  # older versions always unpack the weights
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **arguments)
    model.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(directory)
    return {"parameters": model.num_parameters()}


def config_of(model: str) -> dict[str, Any]:
    """Return the model's config with all defaults, or an error; nothing else is downloaded."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        return {"error": str(error)}
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {"config": found}


def encode(model: str, messages: list[str]) -> dict[str, Any]:
    """Return the tokens of each message to the model in its chat template, and the token that ends answers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": message}] for message in messages]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return {"prompts": [tokenizer(text)["input_ids"] for text in texts], "stop": [tokenizer.eos_token_id]}


def decode(model: str, answers: list[list[int]]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return {"texts": [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]}


class Engine:
    """The calls that the pipe accepts; each method's return value is the answer."""

    def __init__(self) -> None:
        self._llm: Any = None

    def start(self, **arguments: Any) -> dict[str, Any]:
        from vllm import LLM

        self._llm = LLM(**arguments)
        config = self._llm.llm_engine.vllm_config
        return {
            "vocabulary": config.model_config.get_vocab_size(),
            "block_tokens": config.cache_config.block_size,
            "max_tokens": config.model_config.max_model_len,
        }

    def generate(
        self, prompts: list[list[int]], tokens: int, stop: list[int] | None = None, salt: str = ""
    ) -> dict[str, Any]:
        """Answer the prompts one by one, greedily.

        `seconds` has the time per prompt until its last token, `first` until its first one, if the engine measures it.
        Answers end after `tokens`, or at a token in `stop`. A prompt shares no cached block with prompts of another
        `salt`.
        """
        from vllm import SamplingParams

        greedy = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, stop_token_ids=stop, detokenize=False
        )
        answers, seconds, first = [], [], []
        for prompt in prompts:
            salted = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
            begin = time.perf_counter()
            (output,) = self._llm.generate(salted, greedy, use_tqdm=False)
            seconds.append(time.perf_counter() - begin)
            first.append(getattr(output.metrics, "first_token_latency", None))
            answers.append(list(output.outputs[0].token_ids))
        return {"answers": answers, "seconds": seconds, "first": first}

    def forget(self) -> dict[str, Any]:
        """Empty the engine's own prefix cache."""
        return {"done": bool(self._llm.reset_prefix_cache())}

    def stop(self) -> None:
        """Stop the engine's processes; its connector drains its saves."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()


def main() -> None:
    # Libraries write to stdout: give the pipe a descriptor of its own, and redirect stdout to stderr.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = Engine()
    calls = (make_model, convert, config_of, encode, decode, engine.start, engine.generate, engine.forget)
    by_name: dict[str, Callable[..., dict[str, Any]]] = {each.__name__: each for each in calls}
    try:
        for line in sys.stdin:
            request = json.loads(line)
            print(json.dumps(by_name[request.pop("call")](**request)), file=replies, flush=True)
    finally:
        engine.stop()


if __name__ == "__main__":
    main()
