"""lm-evaluation-harness' model `hf` without weights: its tokens, windows and truncation, with our engine's answers.

The harness' own code, which this class inherits, tokenizes prompts, truncates long texts and puts a token before an
empty context. Only the methods that would run the model are replaced.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from quantmill.common import limited, remote_code, special_tokens, tokenizer
from quantmill.common.program import UserError, first_line
from quantmill.tasks.answers import Answers

WINDOWS = 4096  # of rolling texts, scored together
MAX_PROMPT = 2**24  # characters of a conversation that a chat template renders
RENDERING = {"megabytes": 512, "seconds": 20}  # limits of one conversation
ROOM = 1  # tokens that an engine without logits reads beyond those that are scored: see tasks.worker

Request = tuple[tuple[str, str] | None, list[int], list[int]]


class Adapter(HFLM):
    """A causal model whose answers come from an engine in another process."""

    def __init__(self, folder: Path, answers: Answers) -> None:
        """Read config.json and the tokenizer of `folder`. Ids are tokenizer.json's, as for the evaluation text. Raises
        `UserError` if transformers cannot read them."""
        remote_code.forbid()
        self.file = folder / tokenizer.FILE
        try:
            config = AutoConfig.from_pretrained(folder)
            with torch.device("meta"):  # without weights
                model = AutoModelForCausalLM.from_config(config)
            with tokenizer.limits(self.file):
                words = tokenizer.for_transformers(folder)
            super().__init__(pretrained=model, tokenizer=words, backend="causal", batch_size=WINDOWS)
        except UserError:
            raise
        except Exception as error:  # whatever transformers raises
            raise UserError(
                f"{folder}: lm-evaluation-harness cannot use its config or tokenizer ({first_line(error)})"
            ) from None
        self.answers = answers
        if "logits" not in answers.facts["capabilities"]:
            self._max_length = self.max_length - ROOM
        self.stop_ids = stop_ids(folder, config)

    def tok_encode(self, string: str, *arguments: Any, **options: Any) -> list[int]:
        with tokenizer.limits(self.file, len(string.encode(errors="replace"))):
            return super().tok_encode(string, *arguments, **options)

    def tok_batch_encode(
        self, strings: list[str], *arguments: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with tokenizer.limits(self.file, sum(len(each.encode(errors="replace")) for each in strings)):
            return super().tok_batch_encode(strings, *arguments, **options)

    def tok_decode(self, tokens: Any, *arguments: Any, **options: Any) -> str:
        with tokenizer.limits(self.file):
            return super().tok_decode(tokens, *arguments, **options)

    def apply_chat_template(self, chat_history: list[dict[str, str]], *arguments: Any, **options: Any) -> str:
        """Render a conversation. Raises `UserError` if the model's template fails or exceeds its limits."""
        with limited.step(f"the chat template of {self.file.parent}", **RENDERING):
            try:
                text = super().apply_chat_template(chat_history, *arguments, **options)
            except (MemoryError, UserError):
                raise
            except Exception as error:  # whatever a template raises
                raise UserError(f"{self.file.parent}: its chat template fails ({first_line(error)})") from None
        if len(text) > MAX_PROMPT:
            raise UserError(
                f"{self.file.parent}: its chat template makes {len(text):,} characters of a conversation, and "
                f"{MAX_PROMPT:,} are the most"
            )
        return text

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return for each continuation its sum of log-probabilities, and whether it is greedy. Continuations after the
        same ids are scored together; long texts come first."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            ids = (context + continuation)[-(self.max_length + 1) :][:-1]
            groups.setdefault(tuple(ids), []).append(number)
        order = sorted(groups, key=lambda ids: (-len(ids), ids))
        entries = [(list(each), [requests[number][2] for number in groups[each]]) for each in order]
        found: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), desc="log-likelihoods", mininterval=1) as bar:
            for each, values in zip(order, self.answers.score(entries), strict=True):
                found |= zip(groups[each], values, strict=True)
                bar.update(len(values))
        return [found[number] for number in range(len(requests))]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the engine's greedy text after each prompt, up to a stop sequence. Raises `UserError` for a task that
        writes more tokens than the model's context has."""
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        texts = []
        for request in tqdm(requests, desc="texts", mininterval=1):
            prompt, words = request.args
            words = normalize_gen_kwargs(words, self.max_gen_toks)
            until = handle_stop_sequences(words.get("until"), eos=eos)
            most = words["max_gen_toks"]
            if most >= self.max_length:
                raise UserError(
                    f"tasks: {request.task_name} writes {most} tokens, and the model's context is {self.max_length}"
                )
            ids, _ = self.tok_batch_encode([prompt], left_truncate_len=self.max_length - most)
            written = self.answers.write(ids[0].tolist(), most, partial(self._ends, until), until)
            texts.append(postprocess_generated_text(self.tok_decode(written), until, think_end_token=None))
        return texts

    def _ends(self, until: Sequence[str], written: list[int]) -> bool:
        """Return whether a text is at its end, by a token that ends a sequence or by a stop sequence."""
        if written[-1] in self.stop_ids:
            return True
        text = self.tok_decode(written, skip_special_tokens=False)
        return any(each in text for each in until if each)


def stop_ids(folder: Path, config: Any) -> set[int]:
    """Return the tokens that end a sequence, from generation_config.json, as in transformers, else from config.json."""
    path = folder / "generation_config.json"
    said = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.exists() else None
    text = config.get_text_config()
    named = getattr(config, "eos_token_id", None)
    said = next((each for each in (said, named) if each is not None), text.eos_token_id)
    return set(special_tokens.select(said, text.vocab_size))
