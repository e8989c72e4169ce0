"""Triton model: token ids to text."""

import json
import os
import sys

import numpy as np
import triton_python_backend_utils as pb_utils

# The interpreter inside Triton's stub does not read PYTHONPATH.
sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
os.environ.setdefault("USE_TORCH", "0")  # a tokenizer needs no PyTorch, which takes seconds and memory to load


class TritonPythonModel:
    """A tokenizer that decodes each response by itself."""

    def initialize(self, args):
        """Load the tokenizer of `tokenizer_dir`."""
        from transformers import AutoTokenizer

        parameters = json.loads(args["model_config"])["parameters"]
        self._tokenizer = AutoTokenizer.from_pretrained(parameters["tokenizer_dir"]["string_value"])
        self._skip = parameters["skip_special_tokens"]["string_value"] == "true"

    def execute(self, requests):
        """OUTPUT, [1, beams] texts, from TOKENS_BATCH, int32 [1, beams, tokens], and SEQUENCE_LENGTH, int32 [1, beams]."""
        return [self._response(request) for request in requests]

    def _response(self, request):
        tokens = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
        lengths = pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy()
        texts = [
            [self._decode(beam[:length]) for beam, length in zip(row, ends, strict=True)]
            for row, ends in zip(tokens, lengths, strict=True)
        ]
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array(texts, dtype=object))])

    def _decode(self, ids):
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=self._skip).encode("utf-8")
