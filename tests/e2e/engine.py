"""One vLLM engine, in a process that mother.py forks: JSON lines in, JSON lines out on a descriptor of their own.

    {"op": "make_model", "folder": ..., "config": {...}}
    {"op": "open", ...LLM arguments, "connector": {...} | null}
    {"op": "generate", "prompts": [[token, ...], ...], "max_tokens": 8, "abort": [index, ...],
     "lora": [name, number, folder] | null}
    {"op": "add", "prompts": [[token, ...], ...]}, {"op": "finish", "steps": 3}
    {"op": "load", "lora": [name, number, folder]}
    {"op": "reset", "connector": false}
    {"op": "environ", "NAME": "value", ...}
    {"op": "close"}

Each answer is {"ok": ...} or {"error": "..."}.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any


class Engine:
    def __init__(self) -> None:
        self.llm: Any = None
        self.number = 0

    def make_model(self, folder: str, config: dict[str, Any]) -> dict[str, Any]:
        """Write a model with random weights, wide ones: with the default width every next token would be the same."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        made = AutoConfig.for_model(**{"model_type": "llama", "initializer_range": 0.1, **config})
        AutoModelForCausalLM.from_config(made).float().save_pretrained(folder)
        return {}

    def make_image_model(self, folder: str, config: dict[str, Any]) -> dict[str, Any]:
        """Write an Idefics 3 with random weights, `config` for its text part, whose images have 64 tokens each.

        Its tokenizer has a token per byte, its chat template only joins the parts of messages.
        """
        import torch
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import (
            AutoConfig,
            Idefics3ForConditionalGeneration,
            Idefics3Processor,
            PreTrainedTokenizerFast,
        )
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        special = ["<pad>", "<s>", "</s>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({text: at for at, text in enumerate([*special, *letters])}, []))
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        names = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=False))
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=special[3:], **names)
        fast.chat_template = (
            "{% for message in messages %}{% for part in message['content'] %}"
            "{{ part['text'] if part['type'] == 'text' else '<image>' }}{% endfor %}{% endfor %}"
        )
        torch.manual_seed(0)
        wide = {"initializer_range": 0.1}
        vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, **wide}
        made = AutoConfig.for_model(
            "idefics3",
            text_config={"model_type": "llama", **wide, **config},
            vision_config={"image_size": 128, "patch_size": 8, **vision},
            image_token_id=special.index("<image>"),
            pad_token_id=0,
            scale_factor=2,
        )
        Idefics3ForConditionalGeneration(made).float().save_pretrained(folder)
        edge = {"longest_edge": 128}
        images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
        processor = Idefics3Processor(images, fast, image_seq_len=64, chat_template=fast.chat_template)
        processor.save_pretrained(folder)
        fast.save_pretrained(folder)
        return {}

    def open(self, connector: dict[str, Any] | None, **arguments: Any) -> dict[str, Any]:
        from vllm import LLM

        if connector is not None:
            arguments["kv_transfer_config"] = {
                "kv_connector": "KVCacheServerConnector",
                "kv_role": "kv_both",
                **connector,
            }
        if "kv_events_config" in arguments:
            from vllm.config import KVEventsConfig

            arguments["kv_events_config"] = KVEventsConfig(**arguments["kv_events_config"])
        self.llm = LLM(**arguments)
        return {}

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 8,
        abort: list[int] | None = None,
        steps_before_abort: int = 2,
        lora: list[Any] | None = None,
    ) -> dict[str, Any]:
        """Run all prompts at once, greedily, and return their tokens; those of `abort` are aborted on the way."""
        names = self.add(prompts, max_tokens, lora)["names"]
        found: dict[str, dict[str, Any]] = {"tokens": {}, "cached": {}}
        if abort:
            found = self.finish(steps_before_abort)
            self.llm.llm_engine.abort_request([names[index] for index in abort])
        found = {key: found[key] | more for key, more in self.finish().items()}
        return {key: [values.get(name) for name in names] for key, values in found.items()}

    def load(self, lora: list[Any]) -> dict[str, Any]:
        from vllm.lora.request import LoRARequest

        return {"loaded": self.llm.llm_engine.add_lora(LoRARequest(*lora))}

    def add(self, prompts: list[list[int]], max_tokens: int = 8, lora: list[Any] | None = None) -> dict[str, Any]:
        """Begin requests without waiting for them."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        adapter = LoRARequest(*lora) if lora else None
        parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        names = []
        for prompt in prompts:
            self.number += 1
            names.append(f"r{self.number}")
            given = {"prompt_token_ids": prompt}
            self.llm.llm_engine.add_request(names[-1], given, parameters, lora_request=adapter)
        return {"names": names}

    def finish(self, steps: int = 0) -> dict[str, Any]:
        """Take `steps` steps, or as many as there are; return of the requests that ended their tokens, and how many
        tokens of their prompts were cached."""
        tokens: dict[str, list[int]] = {}
        cached: dict[str, int | None] = {}
        taken = 0
        while self.llm.llm_engine.has_unfinished_requests() and (not steps or taken < steps):
            for output in self.llm.llm_engine.step():
                if output.finished:
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
                    cached[output.request_id] = output.num_cached_tokens
            taken += 1
        return {"tokens": tokens, "cached": cached}

    def reset(self, running: bool = False, connector: bool = False) -> dict[str, Any]:
        return {"reset": self.llm.llm_engine.reset_prefix_cache(running, connector)}

    def environ(self, **values: str) -> dict[str, Any]:
        os.environ.update(values)
        return {}

    def metric(self, name: str) -> dict[str, Any]:
        return {"value": sum(m.value for m in self.llm.get_metrics() if m.name == name)}

    def close(self) -> dict[str, Any]:
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
        return {}


def main(descriptor: int) -> None:
    answers = os.fdopen(descriptor, "w")
    engine = Engine()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": getattr(engine, request.pop("op"))(**request)}
        except Exception as error:  # noqa: BLE001  # the test shall see it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    engine.close()
