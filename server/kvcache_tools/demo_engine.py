"""One vLLM engine behind a pipe, for the demo: one JSON object per line in, one per line out.

It runs in a process of its own and is the only module of the server's package that uses vLLM.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Encoded(NamedTuple):
    """The tokens of each message, and those that end an answer."""

    prompts: list[list[int]]
    stop: list[int]


class EngineFacts(NamedTuple):
    """Sizes in tokens; 0: there is no window, or attention is not sparse."""

    vocabulary: int
    block_tokens: int
    batched_tokens: int
    window: int
    top_k: int  # the tokens that sparse attention selects
    dtype: str
    vllm: str


class Generated(NamedTuple):
    """Per prompt: the answer, the seconds until its last token, and until its first one (0: not measured), the tokens
    that were cached, and, if requested, the log-probability of each token of the answer, and the second token with its
    own."""

    answers: list[list[int]]
    seconds: list[float]
    first: list[float]
    cached: list[int]
    logprobs: list[list[float]]
    second: list[list[tuple[int, float]]]


def make_model(directory: str, config: Mapping[str, Any]) -> int:
    """Write a Llama of the given shape with random but reproducible float32 weights; return their number.

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
    return int(model.num_parameters())


def randomize(model: str, directory: str) -> None:
    """Write a model with the config of `model` and random but reproducible weights to `directory`, without a
    tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model)
    config.get_text_config().initializer_range = 0.1  # wide, as above
    made = AutoModelForCausalLM.from_config(config)
    made.to(getattr(config, "dtype", None) or torch.float32).save_pretrained(directory)


def convert(gguf: str, directory: str) -> None:
    """Write the model in the file `gguf` to `directory` in bfloat16, with its tokenizer, as vLLM reads it."""
    import torch
    import transformers

    folder, file = os.path.split(gguf)
    newer = hasattr(transformers, "GgufConfig")  # older versions always unpack the weights
    unpacked = {"quantization_config": transformers.GgufConfig(dequantize=True)} if newer else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.bfloat16, **unpacked)
    model.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(directory)


def config_of(model: str) -> Mapping[str, Any] | str:
    """Return the model's config with all defaults, or what is wrong; nothing else is downloaded."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        return str(error)
    found: Mapping[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found


def encode(model: str, messages: list[str]) -> Encoded:
    """Encode each message in the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": message}] for message in messages]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return Encoded([tokenizer(text)["input_ids"] for text in texts], [tokenizer.eos_token_id])


def decode(model: str, answers: list[list[int]]) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]


class Engine:
    """The calls that the pipe accepts; each method's return value is the answer."""

    def __init__(self) -> None:
        self._llm: Any = None

    def start(self, **arguments: Any) -> EngineFacts:
        import vllm

        self._llm = vllm.LLM(**arguments)
        config = self._llm.llm_engine.vllm_config
        text = config.model_config.hf_text_config
        windows = (getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size"))
        return EngineFacts(
            config.model_config.get_vocab_size(),
            config.cache_config.block_size,
            config.scheduler_config.max_num_batched_tokens,
            next((each for each in windows if isinstance(each, int)), 0),
            getattr(text, "index_topk", None) or 0,
            str(config.model_config.dtype).removeprefix("torch."),
            vllm.__version__,
        )

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int,
        stop: list[int] | None = None,
        salt: str = "",
        logprobs: bool = False,
    ) -> Generated:
        """Answer the prompts one by one, greedily.

        Answers end after `tokens`, or at a token in `stop`. A prompt shares no cached block with prompts of another
        `salt`.
        """
        from vllm import SamplingParams

        greedy = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            stop_token_ids=stop,
            detokenize=False,
            logprobs=2 if logprobs else None,
        )
        found = Generated([], [], [], [], [], [])
        for prompt in prompts:
            salted = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
            begin = time.perf_counter()
            (output,) = self._llm.generate(salted, greedy, use_tqdm=False)
            found.seconds.append(time.perf_counter() - begin)
            found.first.append(getattr(output.metrics, "first_token_latency", None) or 0.0)
            answer = output.outputs[0]
            found.answers.append(list(answer.token_ids))
            found.cached.append(output.num_cached_tokens or 0)
            rows = list(zip(answer.token_ids, answer.logprobs or (), strict=False))
            found.logprobs.append([row[token].logprob for token, row in rows])
            others = [[(o.logprob, other) for other, o in row.items() if other != token] for token, row in rows]
            found.second.append([(other, logprob) for logprob, other in map(max, others)])
        return found

    def forget(self) -> bool:
        """Empty the engine's own prefix cache; return whether it is empty now."""
        return bool(self._llm.reset_prefix_cache())

    def stop(self) -> None:
        """Stop the engine's processes; its connector drains its saves."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()


def main() -> None:
    # Libraries write to stdout: give the pipe a descriptor of its own, and redirect stdout to stderr.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = Engine()
    calls = (make_model, randomize, convert, config_of, encode, decode, engine.start, engine.generate, engine.forget)
    by_name: dict[str, Callable[..., object]] = {each.__name__: each for each in calls}
    try:
        for line in sys.stdin:
            request = json.loads(line)
            print(json.dumps(by_name[request.pop("call")](**request)), file=replies, flush=True)
    finally:
        engine.stop()


if __name__ == "__main__":
    main()
