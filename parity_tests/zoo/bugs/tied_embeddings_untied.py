"""The head gets its own copy of the embedding: values agree, and each keeps only its own half of the gradient."""

from unittest.mock import patch

from torch import nn

from parity_tests.zoo import Bug

_load = nn.Module.load_state_dict


def _load_and_untie(self, *args, **kwargs):
    result = _load(self, *args, **kwargs)
    config = getattr(self, "config", None)
    if config is not None and config.tie_word_embeddings:
        self.lm_head.weight = nn.Parameter(self.lm_head.weight.detach().clone())
    return result


BUG = Bug(
    what="tied embeddings untied",
    where="sharded loading unties in silence: torchtune issue 616, verl issue 7834, NeMo Automodel PR 2511",
    stage="gradients",
    apply=lambda: patch.object(nn.Module, "load_state_dict", _load_and_untie),
    likely={"model": ("tied", "smollm2")},
)
