"""What answers prompts: a model of transformers in this process, or vLLM through lm-eval's own class for it."""

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from anchorline.errors import UserError, quoted, quoted_reason
from torchtrain.evaluation import longbench
from torchtrain.evaluation.generation import AnswerCost, Generator
from torchtrain.evaluation.suite import CHOICES, Suite, benchmark_of
from torchtrain.modeling.placement import tell_devices

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_VLLM_PROMPTS = 128  # asked at a time: enough to fill its batches, few enough to tell how far it is
OnBatch = Callable[[int, AnswerCost], None]
Pair = tuple[list[int], list[int]]  # ids of a context and of what follows it


class Engine(Protocol):
    """Answers greedily, or says how likely answers are. Made without loading anything: the first question loads."""

    attention: str
    arguments: dict[str, Any]  # what its numbers depend on, besides weights and dtype

    def open(self) -> None:
        """Load the model, if it is not yet."""
        ...

    @property
    def shares_prefixes(self) -> bool:
        """Whether what prompts share at their start is computed once."""
        ...

    @property
    def device(self) -> str:
        """What it runs on, for the record."""
        ...

    def answers(self, task: str, prompts: Sequence[Sequence[int]], room: int, on_batch: OnBatch) -> list[list[int]]:
        """Return what follows each prompt: at most `room` tokens, without the one that ends it."""
        ...

    def log_likelihoods(self, pairs: Sequence[Pair], on_batch: OnBatch) -> list[float]:
        """Return log p of what follows each context, in nats."""
        ...


class TorchEngine:
    """A model of transformers in this process.

    Args:
        load: gives the model, in evaluation mode, with transformers' own attention.
        suite: says how much is held at a time.
        tokenizer: of the model.
    """

    attention = "causal, sdpa"

    def __init__(
        self, load: Callable[[], "PreTrainedModel"], suite: Suite, tokenizer: "PreTrainedTokenizerFast"
    ) -> None:
        self._load, self._suite, self._tokenizer = load, suite, tokenizer
        self.arguments = {}

    @cached_property
    def model(self) -> "PreTrainedModel":
        """The model, loaded when it is first asked."""
        return self._load()

    def open(self) -> None:
        """See `Engine`."""
        _ = self.model

    @property
    def shares_prefixes(self) -> bool:
        """See `Engine`."""
        return Generator(self.model, 1, []).shares_prefixes

    @property
    def device(self) -> str:
        """See `Engine`."""
        return tell_devices(self.model)

    def answers(self, task: str, prompts: Sequence[Sequence[int]], room: int, on_batch: OnBatch) -> list[list[int]]:
        """See `Engine`."""
        model = self.model
        ends = end_ids((model.generation_config, model.config, self._tokenizer))
        breaks = _breaks(task, self._tokenizer)
        generator = Generator(model, self._suite.batch_tokens, [*ends, *breaks], opens=bool(breaks))
        return generator.answers(prompts, room, on_batch)

    def log_likelihoods(self, pairs: Sequence[Pair], on_batch: OnBatch) -> list[float]:
        """See `Engine`."""
        return Generator(self.model, self._suite.batch_tokens, []).log_likelihoods(pairs, on_batch)


class VllmEngine:
    """vLLM, by lm-eval's own class, which spreads it over GPUs. It is given token ids, the same as any engine.

    Args:
        folder: the model's.
        suite: `vllm` holds further arguments of lm-eval's class, such as tensor_parallel_size.
        dtype: of weights and activations.
        length: the most tokens of a prompt and its answer.
        config: of the model: its EOS ends answers.
        tokenizer: of the model.

    Raises:
        UserError: vLLM is not installed.
    """

    attention = "causal, vllm"
    shares_prefixes = True

    def __init__(
        self, folder: str, suite: Suite, dtype: str, length: int, config: Any, tokenizer: "PreTrainedTokenizerFast"
    ) -> None:
        self._kind, self._sampling = vllm_classes()
        self.arguments = {"backend": "vllm", **suite.vllm}
        # vLLM asks for room to generate a token where likelihoods are wanted, and refuses more than the model holds.
        positions = getattr(config, "max_position_embeddings", None) or length + 1
        chooses = any(benchmark_of(task) in CHOICES for task in suite.tasks)
        self._arguments: dict[str, Any] = {
            "pretrained": folder,
            "dtype": dtype,
            "max_model_len": min(length + 1, positions) if chooses else length,
            "seed": suite.seed,
            "enable_prefix_caching": True,
            **suite.vllm,
        }
        self._ends, self._tokenizer = end_ids((config, tokenizer)), tokenizer

    @cached_property
    def _library_model(self) -> Any:
        try:
            return self._kind(**self._arguments)
        except (TypeError, ValueError, ModuleNotFoundError) as error:
            raise UserError(f"backend vllm: {quoted_reason(error)}; mend vllm in the suite") from None

    def open(self) -> None:
        """See `Engine`."""
        _ = self._library_model

    @property
    def device(self) -> str:
        """See `Engine`."""
        return f"vllm {self._arguments.get('tensor_parallel_size', 1)} GPUs"

    def answers(self, task: str, prompts: Sequence[Sequence[int]], room: int, on_batch: OnBatch) -> list[list[int]]:
        """See `Engine`."""
        breaks = list(_breaks(task, self._tokenizer))
        stops = [*self._ends, *breaks]
        sampling = self._sampling(
            temperature=0, max_tokens=room, min_tokens=len(breaks[:1]), stop_token_ids=stops, detokenize=False
        )
        answers: list[list[int]] = []
        for first in range(0, len(prompts), _VLLM_PROMPTS):
            requests = [list(prompt) for prompt in prompts[first : first + _VLLM_PROMPTS]]
            outputs = self._library_model._model_generate(requests=requests, generate=True, sampling_params=sampling)
            said = [list(output.outputs[0].token_ids) for output in outputs]
            answers += [ids[:-1] if ids and ids[-1] in stops else ids for ids in said]
            read = sum(map(len, requests))
            on_batch(len(answers), AnswerCost(read, read, sum(map(len, said))))
        return answers

    def log_likelihoods(self, pairs: Sequence[Pair], on_batch: OnBatch) -> list[float]:
        """See `Engine`."""
        requests = [(None, list(context), list(after)) for context, after in pairs]
        longest = max((len(context) + len(after) for _, context, after in requests), default=0)
        if longest >= (most := self._arguments["max_model_len"]):  # lm-eval would cut it on the left
            raise UserError(
                f"backend vllm: a prompt and its answer have {longest:,} tokens, and vLLM reads {most - 1:,} of this "
                "model where likelihoods are asked; set backend: torch"
            )
        found = self._library_model._loglikelihood_tokens(requests, disable_tqdm=True)
        if not all(math.isfinite(log_p) for log_p, _ in found):
            raise UserError("backend vllm: likelihoods are not finite; the checkpoint has diverged")
        read = sum(len(context) + len(after) for context, after in pairs)
        on_batch(len(found), AnswerCost(read, read, 0))
        return [float(log_p) for log_p, _ in found]


def vllm_classes() -> tuple[Any, Any]:
    """Return lm-eval's class for vLLM and vLLM's sampling parameters.

    Raises:
        UserError: vLLM is not installed, or lm-eval has no such class.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UserError("backend vllm: the package vllm is not installed: pip install vllm, or set backend to torch")
    try:
        kind = importlib.import_module("lm_eval.models.vllm_causallms").VLLM
        return kind, importlib.import_module("vllm").SamplingParams
    except (ImportError, AttributeError) as error:
        raise UserError(f"backend vllm: lm-eval cannot use it ({quoted(quoted_reason(error))})") from None


def end_ids(kinds: Sequence[Any]) -> list[int]:
    """Return what ends an answer: the EOS of the first that has one (generation config, config, tokenizer)."""
    ends = next((end for kind in kinds if (end := getattr(kind, "eos_token_id", None)) is not None), [])
    return [ends] if isinstance(ends, int) else list(ends)


def _breaks(task: str, tokenizer: "PreTrainedTokenizerFast") -> Sequence[int]:
    return longbench.newline_stops(task, tokenizer) if benchmark_of(task) == "longbench" else []
